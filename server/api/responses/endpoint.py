"""POST /v1/responses, /v1/responses/compact and /v1/responses/input_tokens."""

from functools import partial
from typing import get_args

from fastapi import APIRouter, Response

from server.api.generation import Generation
from server.api.openapi import (
    ENGINE_ERRORS,
    MODEL_ERRORS,
    REQUEST_HEADERS,
    event_responses,
    json_responses,
)
from server.api.responses import items
from server.api.responses.background import answer_at_once
from server.api.responses.compact import asking_for_summary, compaction_renderer
from server.api.responses.events import ResponseEvent
from server.api.responses.keeping import Keeping, own_items
from server.api.responses.parse import parse, parse_count
from server.api.responses.render import renderer
from server.api.responses.schema import ItemReference, ResponsesRequest
from server.api.route import ModelRoute, json_response
from server.api.services import Services, ServicesDep
from server.api.tokenize import count_tokens_of
from server.errors import invalid_field
from server.http.call import Call
from server.store.service import ResponseStore

RESPONSE_RESPONSES = event_responses(items.Response, get_args(ResponseEvent), *MODEL_ERRORS)

_UNKEPT = "nothing is stored between requests: the server runs with --response-store none"

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/responses", responses=RESPONSE_RESPONSES, openapi_extra=REQUEST_HEADERS)
async def create_response(body: ResponsesRequest, call: Call, services: ServicesDep) -> Response:
    """Answer a list of items with more items."""
    if services.store is None:
        _refuse_kept(body)
        return Generation(call, services, body, parse, renderer)
    keeping = _keeping(call, services, services.store, body)
    whole, earlier = await keeping.whole_request()
    if body.background:
        return await answer_at_once(call, services, keeping, whole, earlier)
    parsed = partial(parse, earlier=earlier)
    return Generation(call, services, whole, parsed, keeping.renderer, keeping.keep)


@router.post("/v1/responses/compact", responses=json_responses(items.Compaction, *MODEL_ERRORS))
async def compact_response(body: ResponsesRequest, call: Call, services: ServicesDep) -> Response:
    """Replace a list of items with a shorter one, which later requests can continue."""
    whole, earlier = await _whole_request(body, call, services)
    parsed = partial(parse, earlier=earlier)
    return Generation(call, services, asking_for_summary(whole), parsed, compaction_renderer)


@router.post(
    "/v1/responses/input_tokens", responses=json_responses(items.InputTokens, *ENGINE_ERRORS)
)
async def count_input_tokens(body: ResponsesRequest, call: Call, services: ServicesDep) -> Response:
    """Count the tokens that a response's input would have."""
    services.asked_model(body.model)
    whole, earlier = await _whole_request(body, call, services)
    source, blame = parse_count(whole, earlier)
    count = await count_tokens_of(source, services, "input", blame)
    return json_response(items.InputTokens(count))


async def _whole_request(
    body: ResponsesRequest, call: Call, services: Services
) -> tuple[ResponsesRequest, int]:
    """Return a request with all items that it continues, and how many these are."""
    if services.store is None:
        _refuse_kept(body)
        return body, 0
    return await _keeping(call, services, services.store, body).whole_request()


def _keeping(
    call: Call, services: Services, store: ResponseStore, body: ResponsesRequest
) -> Keeping:
    not_kept = partial(services.metrics.count, "responses_not_kept")
    return Keeping(store, str(call.tenant.id), body, not_kept)


def _refuse_kept(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "store", "background"):
        if getattr(request, name):
            raise invalid_field(name, f"{_UNKEPT}")
    for index, item in enumerate(own_items(request)):
        if isinstance(item, ItemReference):
            raise invalid_field(f"input[{index}]", f"{_UNKEPT}")
