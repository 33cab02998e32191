"""Answers at once to requests with `background`, whose responses are made and kept meanwhile."""

import asyncio
import logging
from functools import partial
from typing import Any

import msgspec

from server.access.limits import MAX_JOBS
from server.access.tenants import SCOPE_KEY
from server.api.context import Context
from server.api.generation import generate
from server.api.responses.items import Response, ResponseError
from server.api.responses.keeping import Keeping, now
from server.api.responses.parse import parse
from server.api.responses.render import begun_response
from server.api.responses.schema import ResponsesRequest
from server.http.call import Call, foreseen
from server.http.errors import ApiError, invalid, unavailable
from server.store.jobs import Jobs
from server.store.records import StoreFull, TooLong
from server.store.service import LEASE, StoreUnavailable

logger = logging.getLogger(__name__)

_NOT_KEPT = (StoreFull, StoreUnavailable, TooLong)


async def answer_at_once(
    call: Call, context: Context, keeping: Keeping, request: ResponsesRequest, earlier: int
) -> None:
    """Begin a response and answer with what it is before there is any output.

    Raises:
        ApiError: too many are being made, or it cannot be kept.
    """
    model = context.model_name(request.model)
    if request.stream:
        raise invalid("stream: not together with background", "stream")
    jobs = keeping.jobs
    if jobs.full:
        raise ApiError(
            429,
            f"There are {MAX_JOBS} responses in the background already.",
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
    detached = _detached(call)
    making = generate(detached, context, request, parsed, keeping.renderer, keeping.keep)
    jobs.begin(response.id, keeping.owner, _make(detached, making, keeping, response, jobs))
    queued = msgspec.structs.replace(response, status="queued")
    await call.send_json(200, msgspec.json.encode(queued))


async def _make(call: Call, making: Any, keeping: Keeping, begun: Response, jobs: Jobs) -> None:
    """Wait for a response; note how it ended if it did not come to be."""
    try:
        await making
        return
    except asyncio.CancelledError:
        ended = msgspec.structs.replace(begun, status="cancelled")
        if jobs.closing:
            ended = _failed(begun, "server_error", "The server ended before the response did.")
    except Exception as error:
        known = foreseen(error, call.request_id)
        ended = _failed(begun, known.code or known.kind, known.message)
    finally:
        if call.reservation is not None:
            call.reservation.release()
    try:
        await keeping.put(ended)
    except _NOT_KEPT:
        logger.warning("response %s could not be noted as %s", ended.id, ended.status)


def _failed(begun: Response, code: str, message: str) -> Response:
    return msgspec.structs.replace(begun, status="failed", error=ResponseError(code, message))


def _detached(call: Call) -> Call:
    """Return a call like this one, whose answer goes nowhere and whose client never hangs up."""
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "path": call.path, "headers": [], SCOPE_KEY: call.tenant}
    detached = Call(scope, receive, send, call.limits)
    detached.body, detached.request_id = call.body, call.request_id
    return detached
