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
from server.api.openapi import REQUEST_HEADERS, event_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.tokenize import count_tokens_of
from server.errors import MessagesErrorResponse
from server.http.call import Call

_MESSAGE = event_responses(Message, get_args(MessageEvent))


class MessagesRoute(ModelRoute):
    """An operation whose errors have the shape that Anthropic's clients expect."""

    error_body = MessagesErrorResponse


router = APIRouter(route_class=MessagesRoute)


@router.post("/v1/messages", responses=_MESSAGE, openapi_extra=REQUEST_HEADERS)
async def create_message(body: MessagesRequest, call: Call, services: ServicesDep) -> Response:
    """Generate the next turn of a conversation (Anthropic's Messages API)."""
    return Generation(call, services, body, parse, renderer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, services: ServicesDep) -> TokenCount:
    """Count the tokens of a conversation's prompt."""
    services.requested_model(body.model)
    source, blame = parse_count(body)
    return TokenCount(await count_tokens_of(source, services, "messages", blame))
