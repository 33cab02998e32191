"""GET and DELETE /v1/responses/ID, POST /v1/responses/ID/cancel: what was kept."""

import re

import msgspec
from fastapi import Request
from fastapi import Response as HttpResponse
from fastapi.responses import StreamingResponse

from server.access.limits import MAX_LISTED
from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant
from server.api.responses.items import Deleted, ItemList
from server.api.responses.journal import told
from server.api.responses.store_errors import kept
from server.http.errors import ApiError, invalid
from server.store.records import UNFINISHED, Status, StoredResponse
from server.store.service import ResponseStore, is_abandoned

_NUMBER = re.compile(r"-1|[0-9]{1,9}")


def owner_of(request: Request) -> str:
    """Return whose what a request names has to be."""
    tenant: Tenant = request.scope.get(SCOPE_KEY, EVERYBODY)
    return str(tenant.id)


class KeptRoutes:
    """Endpoints for responses that were kept."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, response_id: str, request: Request) -> HttpResponse:
        """Show a response, or tell its events with `stream`, behind number `starting_after`."""
        record, query = await self._found(request, response_id), request.query_params
        if query.get("stream", "false") in ("false", "0"):
            if "starting_after" in query:
                raise invalid("starting_after: needs stream", "starting_after")
            return _json(record.response)
        if query["stream"] not in ("true", "1"):
            raise invalid("stream: must be true or false", "stream")
        if not msgspec.json.decode(record.response, type=_Made).background:
            raise invalid("stream: only for responses that were begun in the background", "stream")
        after = query.get("starting_after", "-1")
        if not _NUMBER.fullmatch(after):
            raise invalid("starting_after: must be the number of an event", "starting_after")
        frames = told(self._store, record.tenant, record.id, int(after))
        return StreamingResponse(
            frames, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def delete(self, response_id: str, request: Request) -> HttpResponse:
        """Forget a response."""
        owner = owner_of(request)
        if not await kept(self._store.delete(owner, response_id)):
            raise not_found("response", response_id)
        self._store.jobs.cancel(response_id)
        return _json(msgspec.json.encode(Deleted(response_id, "response")))

    async def cancel(self, response_id: str, request: Request) -> HttpResponse:
        """Give up a response that is made in the background."""
        record = await self._found(request, response_id)
        if not msgspec.json.decode(record.response, type=_Made).background:
            raise invalid("Only responses that were begun in the background can be cancelled.")
        if record.status in UNFINISHED:
            await kept(self._store.cancel(record.tenant, record.id))
            self._store.jobs.cancel(response_id)
            record = await self._ended(record, "cancelled")
        return _json(record.response)

    async def input_items(self, response_id: str, request: Request) -> HttpResponse:
        """List the items that a response's request added."""
        record = await self._found(request, response_id)
        items = msgspec.json.decode(record.input, type=list[msgspec.Raw])
        return _json(msgspec.json.encode(page(request, items)))

    async def _found(self, request: Request, id_: str) -> StoredResponse:
        record = await kept(self._store.get(owner_of(request), id_))
        if record is None:
            raise not_found("response", id_)
        return await self._ended(record, "failed") if is_abandoned(record) else record

    async def _ended(self, record: StoredResponse, status: Status) -> StoredResponse:
        """Note that an unfinished response is over, unless it has been finished meanwhile."""
        shown = msgspec.json.decode(record.response)
        shown["status"] = status
        if status == "failed":
            why = "The process that made the response ended."
            shown["error"] = {"code": "server_error", "message": why}
        ended = msgspec.structs.replace(record, status=status, response=msgspec.json.encode(shown))
        await kept(self._store.put(ended, only_known=True))
        return await kept(self._store.get(record.tenant, record.id)) or ended


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
    """Nothing of this kind is kept under the name."""
    return ApiError(404, f"The {kind} {id_!r} is not kept, or is no more.", code="not_found")


def _json(body: bytes) -> HttpResponse:
    return HttpResponse(body, media_type="application/json")
