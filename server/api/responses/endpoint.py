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

from server.api.answer_builder import BuiltBody, event_frames
from server.api.generation import Generation
from server.api.openapi import QUEUED, REQUEST_HEADERS, event_responses, json_responses
from server.api.responses import items
from server.api.responses.events import ResponseEvent, ResponseFailed
from server.api.responses.journal import Journal, follow_events
from server.api.responses.parse import parse, parse_count
from server.api.responses.render import initial_response, response_builder
from server.api.responses.request_storage import (
    NOT_STORED,
    TOO_MANY_IN_BACKGROUND,
    RequestStorage,
    item_of,
    now,
    request_items,
)
from server.api.responses.schema import MessageItem, ResponsesRequest
from server.api.route import ModelRoute
from server.api.services import Services, ServicesDep
from server.api.tokenize import count_tokens_of
from server.errors import unavailable
from server.generate.request import GenerationRequest
from server.http.call import Call, Pushed
from server.http.errors import client_error
from server.store.service import Jobs
from server.text.detokenizer import TokenTable

RESPONSE_RESPONSES = event_responses(items.Response, get_args(ResponseEvent))

_SUMMARY_PROMPT = (
    "Summarize the conversation so far for an assistant that continues it and sees only this "
    "summary: the task, decisions, completed work, important names and numbers, and open tasks. "
    "Write only the summary."
)
_ANSWER_FIELDS = (
    "tools",
    "tool_choice",
    "text",
    "structured_outputs",
    "stream",
    "store",
    "background",
)
"""Fields that affect only the answer, not the conversation."""

logger = logging.getLogger(__name__)
router = APIRouter(route_class=ModelRoute)


@router.post("/v1/responses", responses=RESPONSE_RESPONSES, openapi_extra=REQUEST_HEADERS)
async def create_response(
    body: ResponsesRequest, call: Call, services: ServicesDep
) -> Response | items.Response:
    """Generate a response: output items for a list of input items."""
    storage = RequestStorage(call, services, body)
    full, earlier = await storage.full_request()
    if body.background:
        return await _answer_immediately(call, services, storage, full, earlier)
    parsed = partial(parse, earlier=earlier)
    return Generation(call, services, full, parsed, storage.renderer, storage.store_final)


@router.post("/v1/responses/compact", responses=json_responses(items.Compaction) | QUEUED)
async def compact_response(body: ResponsesRequest, call: Call, services: ServicesDep) -> Response:
    """Replace a list of items with a shorter one that later requests can continue."""
    full, earlier = await RequestStorage(call, services, body).full_request()
    conversation = [*request_items(full), MessageItem(role="user", content=_SUMMARY_PROMPT)]
    changed: dict[str, Any] = {
        **dict.fromkeys(_ANSWER_FIELDS),
        "input": conversation,
        "truncation": "auto",
    }
    summary_request = full.model_copy(update=changed)
    return Generation(call, services, summary_request, partial(parse, earlier=earlier), _compaction)


def _compaction(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable
) -> BuiltBody[items.Response]:
    """Return a renderer of the response text as a summary, after the users' messages."""
    earlier = [each for each in request_items(body)[:-1] if isinstance(each, MessageItem)]
    questions = [item_of(each) for each in earlier if each.role == "user"]

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
            output=[*questions, packed],
            usage=response.usage,
        )

    return BuiltBody(response_builder(body, request, table, None), show)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponsesRequest, call: Call, services: ServicesDep
) -> items.InputTokens:
    """Count the tokens of a response's input."""
    services.requested_model(body.model)
    full, earlier = await RequestStorage(call, services, body).full_request()
    source, blame = parse_count(full, earlier)
    return items.InputTokens(await count_tokens_of(source, services, "input", blame))


# -- requests with `background`: answered immediately; responses are generated and stored later ----


async def _answer_immediately(
    call: Call, services: Services, storage: RequestStorage, request: ResponsesRequest, earlier: int
) -> Response | items.Response:
    """Start a response and return it before there is any output, or stream its events."""
    model, _ = services.requested_model(request.model)
    services.tenancy.check(request.priority, pins_rank=call.pinned_rank is not None)
    store, owner = services.store, str(call.tenant.id)
    assert store is not None, "background is refused without it"
    if store.jobs.has_max_jobs(owner):
        raise TOO_MANY_IN_BACKGROUND
    response = initial_response(request, storage.name, now(), model)
    response.store = True
    try:
        await storage.put(response, is_new=True)
    except NOT_STORED as error:
        raise unavailable("The response could not be stored; try again later.") from error
    parsed = partial(parse, earlier=earlier)
    journal = Journal(store, owner, response.id) if request.stream else None

    async def store_events(message: Message) -> None:
        if journal is not None and message["type"] == "http.response.body":
            await journal.add(message["body"])

    detached = call.detached(store_events)
    generation = Generation(
        detached, services, request, parsed, storage.renderer, storage.store_final
    )
    task = _make(detached, generation, storage, response, journal, store.jobs)
    store.jobs.begin(response.id, owner, task)
    if request.stream:
        frames = follow_events(store, owner, response.id, services.config.http.sse_keep_alive)
        return Pushed(partial(_send, call, frames))
    return msgspec.structs.replace(response, status="queued")


async def _send(call: Call, frames: AsyncIterator[bytes]) -> None:
    """Send events to a client until they end or the client disconnects."""
    with call:
        async for each in frames:
            await call.send_events(each, more=True)
        await call.send_events(b"", more=False)


async def _make(
    call: Call,
    generation: Generation[ResponsesRequest],
    storage: RequestStorage,
    initial: items.Response,
    journal: Journal | None,
    jobs: Jobs,
) -> None:
    """Generate a response; store its final status if it did not complete."""
    ended = _failed(initial, "server_error", "The generation was aborted.")
    try:
        await generation.generate()
        if storage.ended:
            return
    except asyncio.CancelledError:
        ended = msgspec.structs.replace(initial, status="cancelled")
        if jobs.closing:
            ended = _failed(
                initial, "server_error", "The server shut down before the response was complete."
            )
    except Exception as error:
        known = client_error(error, call.request_id)
        ended = _failed(initial, known.code or known.kind, known.message)
    finally:
        call.release()
    if journal is not None and not journal.ended and ended.status == "failed":
        event = ResponseFailed(response=ended, sequence_number=journal.next_number)
        await journal.add(event_frames([event]))
    try:
        await storage.put(ended)
    except NOT_STORED:
        logger.warning("response %s could not be stored as %s", ended.id, ended.status)


def _failed(initial: items.Response, code: str, message: str) -> items.Response:
    return msgspec.structs.replace(
        initial, status="failed", error=items.ResponseError(code, message)
    )
