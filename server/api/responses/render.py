"""Responses as clients see them: events of a stream, or one body."""

from typing import Any

from server.api.growing import GrowingBody
from server.api.responses.items import ConversationId, Response
from server.api.responses.output import GrowingResponse
from server.api.responses.schema import ConversationName, ResponsesRequest
from server.api.responses.tools import offered_tools
from server.generate.request import GenerationRequest
from server.text.detokenizer import TokenTable

ResponseRenderer = GrowingBody[Response] | GrowingResponse


def renderer(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable, name: str | None = None
) -> ResponseRenderer:
    """Return what shows the answer to a request.

    If it is stored, the ids of the response and of its items end with `name`.
    """
    growing = growing_response(body, request, table, name)
    return growing if body.stream else GrowingBody(growing)


def growing_response(
    body: ResponsesRequest, request: GenerationRequest, table: TokenTable, name: str | None
) -> GrowingResponse:
    """Return the response to a request before there is any output; `name` as in `renderer`."""
    response = begun_response(body, name or request.request_id, request.created, request.model)
    response.temperature = request.sampling.temperature
    response.top_p = request.sampling.top_p
    response.store = name is not None
    tools = {tool.function["name"]: tool for tool in offered_tools(body, 0)}
    return GrowingResponse(response, request, table, tools)


def begun_response(request: ResponsesRequest, name: str, created: int, model: str) -> Response:
    """Return the response as it is before there is any output."""

    def sent(value: Any, default: Any) -> Any:
        return default if value is None else value.model_dump(exclude_none=True, by_alias=True)

    choice, conversation = request.tool_choice, request.conversation
    if isinstance(conversation, ConversationName):
        conversation = conversation.id
    text = {"format": {"type": "text"}, **sent(request.text, {})}
    return Response(
        id=f"resp_{name}",
        created_at=created,
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_logprobs=request.top_logprobs or 0,
        text=text,
        tool_choice=choice if isinstance(choice, str) else sent(choice, "auto"),
        tools=[
            {"parameters": None, "strict": None, **tool.model_dump(exclude_unset=True)}
            for tool in request.tools or ()
        ],
        reasoning={"effort": None, "summary": None, **sent(request.reasoning, {})},
        user=request.user,
        previous_response_id=request.previous_response_id,
        conversation=None if conversation is None else ConversationId(conversation),
        background=bool(request.background),
        truncation=request.truncation or "disabled",
    )
