"""/v1/conversations: lists of items that responses continue."""

import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from server.api.openapi import ENGINE_ERRORS, json_responses
from server.api.responses.items import Conversation, Deleted, ItemList, OutputMessage
from server.api.responses.keeping import is_conversation, kept, kept_item, now
from server.api.responses.kept import KEPT_ERRORS, not_found, owner_of, page, store_of
from server.api.responses.schema import (
    ConversationRequest,
    InputItem,
    ItemReference,
    ItemsRequest,
    MetadataRequest,
)
from server.api.route import ApiRoute, json_response
from server.api.services import Services, ServicesDep
from server.errors import invalid
from server.http.call import Call
from server.store.records import Part, Record
from server.store.sql import SqlBackend

_ONE = "/v1/conversations/{conversation_id}"
_CONVERSATION = json_responses(Conversation, *ENGINE_ERRORS)
_LISTED = json_responses(ItemList, *ENGINE_ERRORS)

T = TypeVar("T")

router = APIRouter(route_class=ApiRoute)


@router.post("/v1/conversations", responses=_CONVERSATION)
async def create_conversation(
    body: ConversationRequest, call: Call, services: ServicesDep
) -> HttpResponse:
    """Begin a conversation."""
    items = _kept_items(body.items or [])
    record = Record(
        id=f"conv_{uuid.uuid4().hex}",
        tenant=str(call.tenant.id),
        created=now(),
        body=msgspec.json.encode(body.metadata or {}),
    )
    store = store_of(services)
    await kept(store.call(SqlBackend.put, record.tenant, record))
    if items:
        await kept(store.call(SqlBackend.add, record.tenant, record.id, items))
    return json_response(_shown(record))


@router.get(_ONE, responses=_CONVERSATION)
async def retrieve(conversation_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Show a conversation, without its items."""
    return json_response(_shown(await _found(services, request, conversation_id, SqlBackend.get)))


@router.post(_ONE, responses=_CONVERSATION)
async def update_conversation(
    body: MetadataRequest, conversation_id: str, call: Call, services: ServicesDep
) -> HttpResponse:
    """Change the metadata of a conversation."""
    record = await _found(services, call, conversation_id, SqlBackend.get)
    record = msgspec.structs.replace(record, body=msgspec.json.encode(body.metadata))
    await kept(store_of(services).call(SqlBackend.put, record.tenant, record, only_known=True))
    return json_response(_shown(record))


@router.delete(_ONE, responses=json_responses(Deleted, *KEPT_ERRORS))
async def delete(conversation_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Delete a conversation with its items."""
    if not is_conversation(conversation_id) or not await kept(
        store_of(services).call(SqlBackend.delete, owner_of(request), conversation_id)
    ):
        raise not_found("conversation", conversation_id)
    return json_response(Deleted(conversation_id, "conversation.deleted"))


@router.get(f"{_ONE}/items", responses=_LISTED)
async def list_items(conversation_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """List the items of a conversation."""
    items = await _found(services, request, conversation_id, SqlBackend.items)
    return json_response(page(request, [msgspec.Raw(item.body) for item in items]))


@router.post(f"{_ONE}/items", responses=_LISTED)
async def add_items(
    body: ItemsRequest, conversation_id: str, call: Call, services: ServicesDep
) -> HttpResponse:
    """Add items to a conversation."""
    items = _kept_items(body.items)
    if not is_conversation(conversation_id) or not await kept(
        store_of(services).call(SqlBackend.add, owner_of(call), conversation_id, items)
    ):
        raise not_found("conversation", conversation_id)
    data = [msgspec.Raw(item.body) for item in items]
    return json_response(ItemList(data, items[0].id, items[-1].id, has_more=False))


@router.get(f"{_ONE}/items/{{item_id}}", responses=json_responses(OutputMessage, *KEPT_ERRORS))
async def retrieve_item(
    conversation_id: str, item_id: str, request: Request, services: ServicesDep
) -> HttpResponse:
    """Show an item of a conversation."""
    for item in await _found(services, request, conversation_id, SqlBackend.items):
        if item.id == item_id:
            return HttpResponse(item.body, media_type="application/json")
    raise not_found("item", item_id)


@router.delete(f"{_ONE}/items/{{item_id}}", responses=_CONVERSATION)
async def delete_item(
    conversation_id: str, item_id: str, request: Request, services: ServicesDep
) -> HttpResponse:
    """Delete an item of a conversation."""
    owner = owner_of(request)
    if not await kept(
        store_of(services).call(SqlBackend.delete_item, owner, conversation_id, item_id)
    ):
        raise not_found("item", item_id)
    return await retrieve(conversation_id, request, services)


async def _found(
    services: Services, request: Request, id_: str, look: Callable[[SqlBackend, str, str], T | None]
) -> T:
    """Return what `look` finds in a tenant's conversation.

    Raises:
        ApiError: 404, the tenant has no such conversation.
    """
    found = None
    if is_conversation(id_):
        found = await kept(store_of(services).call(look, owner_of(request), id_))
    if found is None:
        raise not_found("conversation", id_)
    return found


def _kept_items(items: Sequence[InputItem]) -> list[Part]:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            field = f"items[{index}]"
            raise invalid(f"{field}: an item of a conversation cannot be a reference", field)
    return [kept_item(item) for item in items]


def _shown(record: Record) -> Conversation:
    metadata = msgspec.json.decode(record.body, type=dict[str, str])
    return Conversation(record.id, int(record.created), metadata)
