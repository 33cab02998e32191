"""Requests with `background`: answered at once, while their responses are generated and stored."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from fastapi import Response as HttpResponse

from server.access.tenants import SCOPE_KEY
from server.api.generation import Generation
from server.api.growing import event_frames
from server.api.responses.events import ResponseFailed
from server.api.responses.items import Response, ResponseError
from server.api.responses.journal import Journal, told
from server.api.responses.keeping import TOO_MANY_IN_BACKGROUND, Keeping, now
from server.api.responses.parse import parse
from server.api.responses.render import begun_response
from server.api.responses.schema import ResponsesRequest
from server.api.route import json_response
from server.api.services import Services
from server.errors import unavailable
from server.http.call import Call, CancelOnDisconnect, Pushed, foreseen
from server.store.records import StoreFull, TooLong
from server.store.service import StoreUnavailable

logger = logging.getLogger(__name__)

_NOT_KEPT = (StoreFull, StoreUnavailable, TooLong)


async def answer_at_once(
    call: Call, services: Services, keeping: Keeping, request: ResponsesRequest, earlier: int
) -> HttpResponse:
    """Begin a response and answer with what it is before there is any output, or its events.

    Raises:
        ApiError: it asks for what the operator does not allow, too many are being made, or it
            cannot be kept.
    """
    model, _ = services.asked_model(request.model)
    services.tenancy.check(request.priority, pins_rank=call.pinned_rank is not None)
    store, owner = keeping.store, keeping.owner
    if store.jobs.is_full_for(owner):
        raise TOO_MANY_IN_BACKGROUND
    response = begun_response(request, keeping.name, now(), model)
    response.store = True
    try:
        await keeping.put(response, begins=True)
    except _NOT_KEPT as error:
        keeping.not_kept()
        raise unavailable("The response could not be stored; try again later.") from error
    parsed = partial(parse, earlier=earlier)
    journal = Journal(store, owner, response.id) if request.stream else None
    detached = _detached(call, journal)
    making = Generation(detached, services, request, parsed, keeping.renderer, keeping.keep)
    made = _make(detached, making.generate(), keeping, response, journal)
    store.jobs.begin(response.id, owner, made)
    if request.stream:
        frames = told(store, owner, response.id, services.config.http.sse_keep_alive)
        return Pushed(partial(_send, call, frames))
    return json_response(msgspec.structs.replace(response, status="queued"))


async def _send(call: Call, frames: AsyncIterator[bytes]) -> None:
    """Send a client events until there are no more, or the client disconnects."""
    with CancelOnDisconnect(call.receive):
        async for each in frames:
            await call.send_events(each, more=True)
        await call.send_events(b"", more=False)


async def _make(
    call: Call, making: Any, keeping: Keeping, begun: Response, journal: Journal | None
) -> None:
    """Wait for a response; record how it ended if it was not completed."""
    ended = _failed(begun, "server_error", "The generation was aborted.")
    try:
        await making
        if keeping.ended:
            return
    except asyncio.CancelledError:
        ended = msgspec.structs.replace(begun, status="cancelled")
        if keeping.store.jobs.closing:
            ended = _failed(begun, "server_error", "The server ended before the response did.")
    except Exception as error:
        known = foreseen(error, call.request_id)
        ended = _failed(begun, known.code or known.kind, known.message)
    finally:
        call.release()
    if journal is not None and not journal.ended and ended.status == "failed":
        event = ResponseFailed(response=ended, sequence_number=journal.next_number)
        await journal.add(event_frames([event]))
    try:
        await keeping.put(ended)
    except _NOT_KEPT:
        keeping.not_kept()
        logger.warning("response %s could not be stored as %s", ended.id, ended.status)


def _failed(begun: Response, code: str, message: str) -> Response:
    return msgspec.structs.replace(begun, status="failed", error=ResponseError(code, message))


def _detached(call: Call, journal: Journal | None) -> Call:
    """Return a copy of a call whose client never hangs up and whose answer is stored.

    It keeps only the headers for tracing and for the choice of an engine.
    """
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if journal is not None and message["type"] == "http.response.body":
            await journal.add(message["body"])

    headers = call.lasting_headers
    scope = {"type": "http", "path": call.path, "headers": headers, SCOPE_KEY: call.key}
    detached = Call(scope, receive, send, call.limits)
    detached.has_client = False
    call.hand_over(detached)
    return detached
