"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import get_args

from fastapi import APIRouter, Response

from server.api.generation import Generation
from server.api.messages.parse import parse, parse_count
from server.api.messages.render import renderer
from server.api.messages.schema import (
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from server.api.openapi import (
    ENGINE_ERRORS,
    MODEL_ERRORS,
    REQUEST_HEADERS,
    event_responses,
    json_responses,
    with_errors,
)
from server.api.route import ModelRoute, json_response
from server.api.services import ServicesDep
from server.api.tokenize import count_tokens_of
from server.errors import MessagesErrorResponse
from server.http.call import Call

_MESSAGE = event_responses(Message, get_args(MessageEvent), *MODEL_ERRORS)
_COUNT = json_responses(TokenCount, *ENGINE_ERRORS)

router = APIRouter(route_class=ModelRoute)


@router.post(
    "/v1/messages",
    responses=with_errors(_MESSAGE, MessagesErrorResponse),
    openapi_extra=REQUEST_HEADERS,
)
async def create_message(body: MessagesRequest, call: Call, services: ServicesDep) -> Response:
    """Answer a conversation with its next turn, as Anthropic's clients know it."""
    return Generation(call, services, body, parse, renderer)


@router.post("/v1/messages/count_tokens", responses=with_errors(_COUNT, MessagesErrorResponse))
async def count_tokens(body: CountTokensRequest, services: ServicesDep) -> Response:
    """Count the tokens of a conversation as the model would read it."""
    services.asked_model(body.model)
    source, blame = parse_count(body)
    count = await count_tokens_of(source, services, "messages", blame)
    return json_response(TokenCount(count))
