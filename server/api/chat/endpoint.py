"""POST /v1/chat/completions and /v1/chat/completions/batch."""

from fastapi import APIRouter, Response

from server.api.chat.parse import parse, parse_batch
from server.api.chat.render import renderer
from server.api.chat.schema import (
    BatchChatRequest,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from server.api.generation import Generation
from server.api.openapi import QUEUED, REQUEST_HEADERS, json_responses, stream_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.http.call import Call

CHAT_RESPONSES = stream_responses(ChatCompletionResponse, ChatCompletionChunk)

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/chat/completions", responses=CHAT_RESPONSES, openapi_extra=REQUEST_HEADERS)
async def create_chat_completion(
    body: ChatCompletionRequest, call: Call, services: ServicesDep
) -> Response:
    """Write the next turn of a conversation."""
    return Generation(call, services, body, parse, renderer)


@router.post(
    "/v1/chat/completions/batch", responses=json_responses(ChatCompletionResponse) | QUEUED
)
async def create_chat_completions(
    body: BatchChatRequest, call: Call, services: ServicesDep
) -> Response:
    """Write the next turn of each of several conversations: a choice for each, in their order."""
    return Generation(call, services, body, parse_batch, renderer)
