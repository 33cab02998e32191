"""POST /v1/responses, /v1/responses/compact and /v1/responses/input_tokens."""

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Response
from starlette.types import Message

from server.api.generation import Generation
from server.api.growing import GrowingBody, event_frames
from server.api.openapi import QUEUED, REQUEST_HEADERS, event_responses, json_responses
from server.api.responses import items
from server.api.responses.events import ResponseEvent, ResponseFailed
from server.api.responses.journal import Journal, told
from server.api.responses.keeping import (
    NOT_KEPT,
    TOO_MANY_IN_BACKGROUND,
    Keeping,
    item_of,
    now,
    own_items,
)
from server.api.responses.parse import parse, parse_count
from server.api.responses.render import begun_response, growing_response
from server.api.responses.schema import MessageItem, ResponsesRequest
from server.api.route import ModelRoute
from server.api.services import Services, ServicesDep
from server.api.tokenize import count_tokens_of
from server.errors import unavailable
from server.generate.request import GenerationRequest
from server.http.call import Call, Pushed
from server.http.errors import foreseen
from server.store.service import Jobs
from server.text.detokenizer import TokenTable

RESPONSE_RESPONSES = event_responses(items.Response, get_args(ResponseEvent))

_ASKED = (
    "Summarize the conversation so far for an assistant that goes on with it and sees nothing "
    "else of it: the task, what was decided and done, names and numbers that matter, what is left "
    "to do. Write the summary only."
)
_LEFT_OUT = ("tools", "tool_choice", "text", "structured_outputs", "stream", "store", "background")
"""Fields that are about an answer, not about the conversation."""

logger = logging.getLogger(__name__)
router = APIRouter(route_class=ModelRoute)


@router.post("/v1/responses", responses=RESPONSE_RESPONSES, openapi_extra=REQUEST_HEADERS)
async def create_response(
    body: ResponsesRequest, call: Call, services: ServicesDep
) -> Response | items.Response:
    """Answer a list of items with more items."""
    keeping = Keeping(call, services, body)
    whole, earlier = await keeping.whole_request()
    if body.background:
        return await _answer_at_once(call, services, keeping, whole, earlier)
    parsed = partial(parse, earlier=earlier)
    return Generation(call, services, whole, parsed, keeping.renderer, keeping.keep)


@router.post("/v1/responses/compact", responses=json_responses(items.Compaction) | QUEUED)
async def compact_response(body: ResponsesRequest, call: Call, services: ServicesDep) -> Response:
    """Replace a list of items with a shorter one, which later requests can continue."""
    whole, earlier = await Keeping(call, services, body).whole_request()
    asked = [*own_items(whole), MessageItem(role="user", content=_ASKED)]
    changed: dict[str, Any] = {**dict.fromkeys(_LEFT_OUT), "input": asked, "truncation": "auto"}
    asking = whole.model_copy(update=changed)
    return Generation(call, services, asking, partial(parse, earlier=earlier), _compaction)


def _compaction(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable
) -> GrowingBody[items.Response]:
    """Return what shows a response's text as a summary, behind the messages of users."""
    said = [each for each in own_items(body)[:-1] if isinstance(each, MessageItem)]
    kept = [item_of(each) for each in said if each.role == "user"]

    def show(response: items.Response) -> items.Compaction:
        messages = [each for each in response.output if isinstance(each, items.OutputMessage)]
        summary = "\n".join([part.text for each in messages for part in each.content])
        packed = {
            "type": "compaction",
            "id": response.id.replace("resp_", "cmp_"),
            "encrypted_content": b64encode(items.SUMMARY_MARK + summary.encode()).decode(),
        }
        return items.Compaction(
            id=response.id,
            created_at=response.created_at,
            output=[*kept, packed],
            usage=response.usage,
        )

    return GrowingBody(growing_response(body, request, table, None), show)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponsesRequest, call: Call, services: ServicesDep
) -> items.InputTokens:
    """Count the tokens that a response's input would have."""
    services.asked_model(body.model)
    whole, earlier = await Keeping(call, services, body).whole_request()
    source, blame = parse_count(whole, earlier)
    return items.InputTokens(await count_tokens_of(source, services, "input", blame))


# -- requests with `background`: answered at once, while responses are generated and stored -------


async def _answer_at_once(
    call: Call, services: Services, keeping: Keeping, request: ResponsesRequest, earlier: int
) -> Response | items.Response:
    """Begin a response and answer with what it is before there is any output, or its events.

    Raises:
        ApiError: it asks for what the operator does not allow, too many are being made, or it
            cannot be kept.
    """
    model, _ = services.asked_model(request.model)
    services.tenancy.check(request.priority, pins_rank=call.pinned_rank is not None)
    store, owner = services.store, str(call.tenant.id)
    assert store is not None, "background is refused without it"
    if store.jobs.is_full_for(owner):
        raise TOO_MANY_IN_BACKGROUND
    response = begun_response(request, keeping.name, now(), model)
    response.store = True
    try:
        await keeping.put(response, begins=True)
    except NOT_KEPT as error:
        raise unavailable("The response could not be stored; try again later.") from error
    parsed = partial(parse, earlier=earlier)
    journal = Journal(store, owner, response.id) if request.stream else None

    async def store_events(message: Message) -> None:
        if journal is not None and message["type"] == "http.response.body":
            await journal.add(message["body"])

    detached = call.detached(store_events)
    making = Generation(detached, services, request, parsed, keeping.renderer, keeping.keep)
    made = _make(detached, making, keeping, response, journal, store.jobs)
    store.jobs.begin(response.id, owner, made)
    if request.stream:
        frames = told(store, owner, response.id, services.config.http.sse_keep_alive)
        return Pushed(partial(_send, call, frames))
    return msgspec.structs.replace(response, status="queued")


async def _send(call: Call, frames: AsyncIterator[bytes]) -> None:
    """Send a client events until there are no more, or the client disconnects."""
    with call:
        async for each in frames:
            await call.send_events(each, more=True)
        await call.send_events(b"", more=False)


async def _make(
    call: Call,
    making: Generation[ResponsesRequest],
    keeping: Keeping,
    begun: items.Response,
    journal: Journal | None,
    jobs: Jobs,
) -> None:
    """Wait for a response; record how it ended if it was not completed."""
    ended = _failed(begun, "server_error", "The generation was aborted.")
    try:
        await making.generate()
        if keeping.ended:
            return
    except asyncio.CancelledError:
        ended = msgspec.structs.replace(begun, status="cancelled")
        if jobs.closing:
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
    except NOT_KEPT:
        logger.warning("response %s could not be stored as %s", ended.id, ended.status)


def _failed(begun: items.Response, code: str, message: str) -> items.Response:
    return msgspec.structs.replace(begun, status="failed", error=items.ResponseError(code, message))
