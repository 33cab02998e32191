"""Answers at once to requests with `background`, whose responses are made and kept meanwhile."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from server.access.tenants import SCOPE_KEY, Wishes
from server.api.context import Context
from server.api.generation import generate
from server.api.responses.events import ResponseFailed
from server.api.responses.items import Response, ResponseError
from server.api.responses.journal import Journal
from server.api.responses.keeping import Keeping, now
from server.api.responses.parse import parse
from server.api.responses.render import begun_response
from server.api.responses.schema import ResponsesRequest
from server.api.shared.rendering import event_frames
from server.http.call import Call, CancelOnDisconnect, foreseen
from server.http.errors import ApiError, unavailable
from server.store.records import StoreFull, TooLong
from server.store.service import LEASE, StoreUnavailable

logger = logging.getLogger(__name__)

_NOT_KEPT = (StoreFull, StoreUnavailable, TooLong)


async def answer_at_once(
    call: Call, context: Context, keeping: Keeping, request: ResponsesRequest, earlier: int
) -> None:
    """Begin a response and answer with what it is before there is any output, or its events.

    Raises:
        ApiError: it asks for what the operator does not allow, too many are being made, or it
            cannot be kept.
    """
    model, _ = context.asked_model(request.model)
    context.tenancy.check(
        Wishes(request.user, request.priority, call.pinned_rank is not None, request.cache_salt)
    )
    jobs = keeping.jobs
    if jobs.is_full_for(keeping.owner):
        raise ApiError(
            429,
            "There are as many responses in the background as there may be.",
            code="rate_limit_exceeded",
            headers=(("retry-after", "1"),),
        )
    response = begun_response(
        request,
        keeping.name,
        now(),
        model,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
    )
    response.store = True
    try:
        await keeping.put(response, now() + LEASE)
    except _NOT_KEPT as error:
        raise unavailable("The response cannot be kept now; try again.") from error
    parsed = partial(parse, earlier=earlier)
    journal = keeping.journal(response.id) if request.stream else None
    detached = _detached(call, journal)
    making = generate(detached, context, request, parsed, keeping.renderer, keeping.keep)
    made = _make(detached, making, keeping, response, journal)
    jobs.begin(response.id, keeping.owner, made)
    if request.stream:
        await send_told(call, keeping.told(response.id))
        return
    queued = msgspec.structs.replace(response, status="queued")
    await call.send_json(200, msgspec.json.encode(queued))


async def send_told(call: Call, frames: AsyncIterator[bytes]) -> None:
    """Tell a client of events until there are no more, or it hangs up."""
    with CancelOnDisconnect(call.receive):
        await call.send_events(b"", more=True)
        async for each in frames:
            await call.send_events(each, more=True)
        await call.send_events(b"", more=False)


async def _make(
    call: Call, making: Any, keeping: Keeping, begun: Response, journal: Journal | None
) -> None:
    """Wait for a response; note how it ended if it did not come to be."""
    ended = _failed(begun, "server_error", "The generation was aborted.")
    try:
        await making
        if keeping.ended:
            return
    except asyncio.CancelledError:
        ended = msgspec.structs.replace(begun, status="cancelled")
        if keeping.jobs.closing:
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
        logger.warning("response %s could not be stored as %s", ended.id, ended.status)


def _failed(begun: Response, code: str, message: str) -> Response:
    return msgspec.structs.replace(begun, status="failed", error=ResponseError(code, message))


def _detached(call: Call, journal: Journal | None) -> Call:
    """Return a call like this one, whose client never hangs up and whose answer is written down.

    Of its headers it has those that say where it runs and what it is a part of.
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
    call.hand_over(detached)
    return detached
