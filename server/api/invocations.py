"""POST /invocations: what hosts of models call, whatever they want of it."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter, Response

from server.api.chat.endpoint import CHAT_RESPONSES, create_chat_completion
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.endpoint import COMPLETION_RESPONSES, create_completion
from server.api.completions.schema import CompletionRequest
from server.api.openapi import REQUEST_HEADERS, any_of
from server.api.responses.endpoint import RESPONSE_RESPONSES, create_response
from server.api.responses.schema import ResponsesRequest
from server.api.route import ModelRoute, fields_of
from server.api.services import Services, ServicesDep
from server.api.vectors.endpoint import classify, create_embeddings, rerank, score
from server.api.vectors.schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)
from server.errors import invalid
from server.http.call import Call
from server.schema.body import RequestBody

AnyRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest


class InvocationRoute(ModelRoute):
    """An operation whose body is that of the endpoint whose fields it has."""

    async def body_type(self, call: Call, services: Services) -> type[RequestBody]:
        """Return what the body of a call is, by its fields and by what the model does."""
        fields, pooling = await fields_of(call.content), services.model.pooling
        if pooling is not None:
            if "query" in fields:
                return RerankRequest
            if "input" in fields:
                return EmbeddingsRequest if pooling.spec.task == "embed" else ClassifyRequest
            return ScoreRequest
        if "messages" in fields:
            return ChatCompletionRequest
        if "prompt" in fields:
            return CompletionRequest
        if "input" in fields:
            return ResponsesRequest
        raise invalid("one of messages, prompt and input is needed", "messages")


_OPERATIONS: dict[type[RequestBody], Callable[..., Awaitable[Response | msgspec.Struct]]] = {
    ChatCompletionRequest: create_chat_completion,
    CompletionRequest: create_completion,
    ResponsesRequest: create_response,
    EmbeddingsRequest: create_embeddings,
    ClassifyRequest: classify,
    ScoreRequest: score,
    RerankRequest: rerank,
}

router = APIRouter(route_class=InvocationRoute)


@router.post(
    "/invocations",
    responses=any_of(CHAT_RESPONSES, COMPLETION_RESPONSES, RESPONSE_RESPONSES),
    openapi_extra=REQUEST_HEADERS,
)
async def invoke(body: AnyRequest, call: Call, services: ServicesDep) -> Response | msgspec.Struct:
    """Answer as the endpoint does whose request it is: messages, a prompt, or input.

    Of a model that makes vectors: input, a query with documents, or pairs.
    """
    return await _OPERATIONS[type(body)](body, call, services)
