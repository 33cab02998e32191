"""GET and DELETE /v1/responses/ID, POST /v1/responses/ID/cancel: stored responses."""

import re

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse
from fastapi.responses import StreamingResponse

from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant
from server.api.openapi import json_responses
from server.api.responses.items import Deleted, ItemList, Response
from server.api.responses.journal import as_failed, told
from server.api.responses.keeping import TOO_MANY_IN_BACKGROUND, is_response, kept
from server.api.route import ApiRoute
from server.api.services import Services, ServicesDep
from server.errors import ApiError, invalid
from server.limits import MAX_LISTED
from server.store.records import UNFINISHED, Record
from server.store.service import ResponseStore
from server.store.sql import SqlBackend

KEPT_ERRORS = (400, 401, 404, 503)
"""Of operations on stored responses that take no body."""
_NUMBER = re.compile(r"-1|[0-9]{1,9}")
_ONE = "/v1/responses/{response_id}"
_SHOWN = json_responses(Response, *KEPT_ERRORS)

router = APIRouter(route_class=ApiRoute)


def owner_of(request: Request) -> str:
    """Return the owner whose records a request may access."""
    tenant: Tenant = request.scope.get(SCOPE_KEY, EVERYBODY)
    return str(tenant.id)


def store_of(services: Services) -> ResponseStore:
    """Return where responses are kept: there are no such operations without it."""
    assert services.store is not None
    return services.store


@router.get(_ONE, responses=_SHOWN)
async def retrieve(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Show a response; with `stream` its events, from number `starting_after` + 1 on."""
    query, store = request.query_params, store_of(services)
    record = await _found(services, request, response_id)
    if query.get("stream", "false") in ("false", "0"):
        if "starting_after" in query:
            raise invalid("starting_after: needs stream", "starting_after")
        if store.is_abandoned(record.id, record.status, record.beat):
            return _json(as_failed(record.body))
        return _json(record.body)
    if query["stream"] not in ("true", "1"):
        raise invalid("stream: must be true or false", "stream")
    if not msgspec.json.decode(record.body, type=_Made).background:
        raise invalid("stream: only for background responses", "stream")
    after = query.get("starting_after", "-1")
    if not _NUMBER.fullmatch(after):
        raise invalid("starting_after: must be the number of an event", "starting_after")
    keep_alive = services.config.http.sse_keep_alive
    frames = told(store, record.tenant, record.id, keep_alive, int(after))
    if store.followers.exceeded(record.tenant, 1):
        raise TOO_MANY_IN_BACKGROUND
    await anext(frames)  # counts the client at once: nothing is awaited before the first item
    return StreamingResponse(
        frames, media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


@router.delete(_ONE, responses=json_responses(Deleted, *KEPT_ERRORS))
async def delete(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Delete a response."""
    if not is_response(response_id) or not await kept(
        store_of(services).call(SqlBackend.delete, owner_of(request), response_id)
    ):
        raise not_found("response", response_id)
    store_of(services).jobs.cancel(response_id)
    return _json(msgspec.json.encode(Deleted(response_id, "response")))


@router.post(f"{_ONE}/cancel", responses=_SHOWN)
async def cancel(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """Cancel a background response."""
    record = await _found(services, request, response_id)
    if not msgspec.json.decode(record.body, type=_Made).background:
        raise invalid("Only background responses can be cancelled.")
    if record.status in UNFINISHED:
        tenant, call = record.tenant, store_of(services).call
        await kept(call(SqlBackend.cancel, tenant, record.id))
        store_of(services).jobs.cancel(response_id)
        shown = msgspec.json.decode(record.body) | {"status": "cancelled"}
        cancelled = msgspec.structs.replace(
            record, status="cancelled", body=msgspec.json.encode(shown)
        )
        await kept(call(SqlBackend.put, tenant, cancelled, only_known=True))
        # It may have been finished meanwhile.
        found = await kept(call(SqlBackend.get, tenant, record.id))
        record = cancelled if found is None else found
    return _json(record.body)


@router.get(f"{_ONE}/input_items", responses=json_responses(ItemList, *KEPT_ERRORS, 413, 415, 500))
async def input_items(response_id: str, request: Request, services: ServicesDep) -> HttpResponse:
    """List the items that a response's request added."""
    record = await _found(services, request, response_id)
    items = msgspec.json.decode(record.input, type=list[msgspec.Raw])
    return _json(msgspec.json.encode(page(request, items)))


async def _found(services: Services, request: Request, id_: str) -> Record:
    record = None
    if is_response(id_):
        record = await kept(store_of(services).call(SqlBackend.get, owner_of(request), id_))
    if record is None:
        raise not_found("response", id_)
    return record


class _Named(msgspec.Struct):
    id: str


class _Made(msgspec.Struct):
    background: bool = False


def page(request: Request, items: list[msgspec.Raw]) -> ItemList:
    """Return the part of a list that a request asks for with `limit`, `order` and `after`.

    Raises:
        ApiError: they are wrong.
    """
    query = request.query_params
    try:
        limit = int(query.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= MAX_LISTED:
        raise invalid(f"limit: must be from 1 to {MAX_LISTED}", "limit")
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order: must be asc or desc", "order")
    if order == "desc":
        items = items[::-1]
    names = [msgspec.json.decode(item, type=_Named).id for item in items]
    start = 0
    if after is not None:
        if after not in names:
            raise not_found("item", after)
        start = names.index(after) + 1
    shown, shown_names = items[start : start + limit], names[start : start + limit]
    first, last = (shown_names[0], shown_names[-1]) if shown else (None, None)
    return ItemList(shown, first, last, start + limit < len(items))


def not_found(kind: str, id_: str) -> ApiError:
    """Return the error for an unknown name of this kind."""
    return ApiError(
        404, f"The {kind} {id_!r} was not found; it may have expired.", code="not_found"
    )


def _json(body: bytes) -> HttpResponse:
    return HttpResponse(body, media_type="application/json")
