"""/v1/responses/ID and /v1/conversations: access to a tenant's stored records."""

import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse
from fastapi.responses import StreamingResponse

from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant
from server.api.openapi import json_responses
from server.api.responses import schema
from server.api.responses.items import Conversation, Deleted, ItemList, OutputMessage, Response
from server.api.responses.journal import as_failed, follow_events
from server.api.responses.request_storage import (
    ID_PREFIXES,
    TOO_MANY_IN_BACKGROUND,
    item_of,
    now,
    part_of,
    store_call,
)
from server.api.route import ApiRoute
from server.api.services import Services, ServicesDep
from server.errors import ApiError, invalid, invalid_field
from server.http.call import Call
from server.limits import MAX_LISTED
from server.store.records import UNFINISHED, Part, Record
from server.store.service import ResponseStore
from server.store.sql import SqlBackend

T = TypeVar("T")

_NUMBER = re.compile(r"-1|[0-9]{1,9}")
_RESPONSE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
_SHOWN = json_responses(Response)


class StoreRoute(ApiRoute):
    """An operation on stored records."""

    errors = (400, 401, 404, 503)


router = APIRouter(route_class=StoreRoute)


# -- responses -----------------------------------------------------------------------------------


@router.get(_RESPONSE, responses=_SHOWN)
async def retrieve(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Return a response, or with `stream` its events after number `starting_after`."""
    query, store = request.query_params, _store(services)
    record = await _find(services, request, SqlBackend.get, response_id)
    if query.get("stream", "false") in ("false", "0"):
        if "starting_after" in query:
            raise invalid_field("starting_after", "requires stream=true")
        if store.is_abandoned(record.id, record.status, record.beat):
            return _json(as_failed(record.body))
        return _json(record.body)
    if query["stream"] not in ("true", "1"):
        raise invalid_field("stream", "must be true or false")
    if not msgspec.json.decode(record.body, type=_WithBackground).background:
        raise invalid_field("stream", "is only for background responses")
    after = query.get("starting_after", "-1")
    if not _NUMBER.fullmatch(after):
        raise invalid_field("starting_after", "must be the number of an event")
    keep_alive = services.config.http.sse_keep_alive
    frames = follow_events(store, record.tenant, record.id, keep_alive, int(after))
    if store.followers.exceeded(record.tenant, 1):
        raise TOO_MANY_IN_BACKGROUND
    await anext(frames)  # registers the client as a follower without waiting
    return StreamingResponse(
        frames, media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


@router.delete(_RESPONSE)
async def delete(response_id: str, request: Request, services: ServicesDep) -> Deleted:
    """Delete a response."""
    await _find(services, request, SqlBackend.delete, response_id)
    _store(services).jobs.cancel(response_id)
    return Deleted(response_id, "response")


@router.post(f"{_RESPONSE}/cancel", responses=_SHOWN)
async def cancel(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Cancel a background response."""
    record = await _find(services, request, SqlBackend.get, response_id)
    if not msgspec.json.decode(record.body, type=_WithBackground).background:
        raise invalid("Cannot cancel a synchronous response.")
    if record.status in UNFINISHED:
        await _call_store(services, request, SqlBackend.cancel, record.id)
        _store(services).jobs.cancel(response_id)
        shown = msgspec.json.decode(record.body) | {"status": "cancelled"}
        cancelled = msgspec.structs.replace(
            record, status="cancelled", body=msgspec.json.encode(shown)
        )
        await _call_store(services, request, SqlBackend.put, cancelled, only_known=True)
        # It may have finished in the meantime.
        found = await _call_store(services, request, SqlBackend.get, record.id)
        record = cancelled if found is None else found
    return _json(record.body)


@router.get(f"{_RESPONSE}/input_items")
async def input_items(response_id: str, request: Request, services: ServicesDep) -> ItemList:
    """List the items that a response's request added."""
    record = await _find(services, request, SqlBackend.get, response_id)
    items = msgspec.json.decode(record.input, type=list[msgspec.Raw])
    return _page(request, items)


# -- conversations -------------------------------------------------------------------------------


@router.post("/v1/conversations")
async def create_conversation(
    body: schema.ConversationRequest, call: Call, services: ServicesDep
) -> Conversation:
    """Create a conversation."""
    items = _stored_items(body.items or [])
    record = Record(
        id=f"conv_{uuid.uuid4().hex}",
        tenant=_owner(call),
        created=now(),
        body=msgspec.json.encode(body.metadata or {}),
    )
    await _call_store(services, call, SqlBackend.put, record)
    if items:
        await _call_store(services, call, SqlBackend.add, record.id, items)
    return _shown(record)


@router.get(_CONVERSATION)
async def retrieve_conversation(
    conversation_id: str, request: Request, services: ServicesDep
) -> Conversation:
    """Return a conversation, without its items."""
    record = await _find(services, request, SqlBackend.get, conversation_id)
    return _shown(record)


@router.post(_CONVERSATION)
async def update_conversation(
    body: schema.MetadataRequest, conversation_id: str, call: Call, services: ServicesDep
) -> Conversation:
    """Change the metadata of a conversation."""
    record = await _find(services, call, SqlBackend.get, conversation_id)
    record = msgspec.structs.replace(record, body=msgspec.json.encode(body.metadata))
    await _call_store(services, call, SqlBackend.put, record, only_known=True)
    return _shown(record)


@router.delete(_CONVERSATION)
async def delete_conversation(
    conversation_id: str, request: Request, services: ServicesDep
) -> Deleted:
    """Delete a conversation with its items."""
    await _find(services, request, SqlBackend.delete, conversation_id)
    return Deleted(conversation_id, "conversation.deleted")


@router.get(f"{_CONVERSATION}/items")
async def list_items(conversation_id: str, request: Request, services: ServicesDep) -> ItemList:
    """List the items of a conversation."""
    items = await _find(services, request, SqlBackend.items, conversation_id)
    return _page(request, [msgspec.Raw(item.body) for item in items])


@router.post(f"{_CONVERSATION}/items")
async def add_items(
    body: schema.ItemsRequest, conversation_id: str, call: Call, services: ServicesDep
) -> ItemList:
    """Add items to a conversation."""
    items = _stored_items(body.items)
    await _find(services, call, SqlBackend.add, conversation_id, items)
    data = [msgspec.Raw(item.body) for item in items]
    return ItemList(data, items[0].id, items[-1].id, has_more=False)


@router.get(f"{_CONVERSATION}/items/{{item_id}}", responses=json_responses(OutputMessage))
async def retrieve_item(
    conversation_id: str, item_id: str, request: Request, services: ServicesDep
) -> HttpResponse:
    """Return an item of a conversation."""
    items = await _find(services, request, SqlBackend.items, conversation_id)
    for item in items:
        if item.id == item_id:
            return _json(item.body)
    raise _not_found("item", item_id)


@router.delete(f"{_CONVERSATION}/items/{{item_id}}")
async def delete_item(
    conversation_id: str, item_id: str, request: Request, services: ServicesDep
) -> Conversation:
    """Delete an item of a conversation."""
    if not await _call_store(services, request, SqlBackend.delete_item, conversation_id, item_id):
        raise _not_found("item", item_id)
    return await retrieve_conversation(conversation_id, request, services)


# -- shared helpers ------------------------------------------------------------------------------


class _WithId(msgspec.Struct):
    id: str


class _WithBackground(msgspec.Struct):
    background: bool = False


def _owner(request: Request) -> str:
    tenant: Tenant = request.scope.get(SCOPE_KEY, EVERYBODY)
    return str(tenant.id)


def _store(services: Services) -> ResponseStore:
    assert services.store is not None, "without a store these operations are not registered"
    return services.store


async def _call_store(
    services: Services, request: Request, query: Callable[..., T], *args: Any, **options: Any
) -> T:
    return await store_call(_store(services).call(query, _owner(request), *args, **options))


async def _find(
    services: Services, request: Request, query: Callable[..., T | None], id_: str, *args: Any
) -> T:
    """Call the store for the record that the path names."""
    kind = "response" if "response_id" in request.path_params else "conversation"
    found = None
    if id_.startswith(ID_PREFIXES[kind]):
        found = await _call_store(services, request, query, id_, *args)
    if found is None or found is False:
        raise _not_found(kind, id_)
    return found


def _not_found(kind: str, id_: str) -> ApiError:
    text = f"{kind.capitalize()} with id {id_!r} not found; it may have expired."
    return ApiError(404, text, code="not_found")


def _stored_items(items: Sequence[schema.InputItem]) -> list[Part]:
    for index, item in enumerate(items):
        if isinstance(item, schema.ItemReference):
            field = f"items[{index}]"
            raise invalid_field(field, "an item of a conversation cannot be a reference")
    return [part_of(item_of(item)) for item in items]


def _shown(record: Record) -> Conversation:
    metadata = msgspec.json.decode(record.body, type=dict[str, str])
    return Conversation(record.id, int(record.created), metadata)


def _page(request: Request, items: list[msgspec.Raw]) -> ItemList:
    """Return the page of a list selected by `limit`, `order` and `after`."""
    query = request.query_params
    try:
        limit = int(query.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= MAX_LISTED:
        raise invalid_field("limit", f"must be from 1 to {MAX_LISTED}")
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    if order == "desc":
        items = items[::-1]
    names = [msgspec.json.decode(item, type=_WithId).id for item in items]
    start = 0
    if after is not None:
        if after not in names:
            raise _not_found("item", after)
        start = names.index(after) + 1
    shown, shown_names = items[start : start + limit], names[start : start + limit]
    first, last = (shown_names[0], shown_names[-1]) if shown else (None, None)
    return ItemList(shown, first, last, start + limit < len(items))


def _json(body: bytes) -> HttpResponse:
    return HttpResponse(body, media_type="application/json")
