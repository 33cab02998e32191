"""Conversion of chat completion bodies to generation requests."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pydantic

from server.api.chat.schema import BatchChatRequest, ChatCompletionRequest, ChatFields
from server.errors import ApiError, invalid_field
from server.generate.budget import check_size
from server.generate.model import ServedModel
from server.generate.request import Conversation, GenerationRequest
from server.http.errors import invalid_body
from server.limits import MAX_SHARED
from server.schema.body import JsonObject
from server.schema.messages import ChatMessage
from server.schema.tools import NamedTool

Blame = Callable[[ApiError], ApiError]


def parse(
    body: ChatCompletionRequest, model: ServedModel, max_model_len: int, blame: Blame | None = None
) -> GenerationRequest:
    """Convert a body to a generation request, with all checks that need no tokens.

    `blame` rewrites errors for requests to another endpoint (`GenerationRequest.blame`).

    Raises:
        ApiError: the request is invalid or exceeds a limit; `param` names the field.
    """
    try:
        return _parsed(body, [conversation(body, body.messages)], model, max_model_len, blame=blame)
    except ApiError as error:
        if blame is None:
            raise
        raise blame(error) from error


def chat_request(body: dict[str, Any], blame: Blame) -> ChatCompletionRequest:
    """Validate the chat completion that a request to another endpoint was translated to.

    Raises:
        ApiError: it is invalid; the error uses that endpoint's field names.
    """
    encoded = msgspec.json.encode(body)
    try:
        return ChatCompletionRequest.model_validate_json(encoded)
    except pydantic.ValidationError as error:
        raise blame(invalid_body(error, encoded)) from error


def renamed(param: str, names: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Return a field name with its prefix replaced according to the first matching pattern."""
    for pattern, name in names:
        if pattern.match(param):
            return pattern.sub(name, param)
    return param


def parse_batch(
    body: BatchChatRequest, model: ServedModel, max_model_len: int
) -> GenerationRequest:
    """Convert a body with several conversations to a generation request, like `parse`.

    Raises:
        ApiError: the request is invalid or exceeds a limit; `param` names the field.
    """
    every = [conversation(body, messages) for messages in body.messages]
    for field in ("documents", "chat_template_kwargs"):
        size = len(msgspec.json.encode(getattr(body, field)))
        if size * len(every) > MAX_SHARED:
            raise invalid_field(
                field,
                f"{size} bytes in each of {len(every)} conversations are more than {MAX_SHARED}",
            )
    return _parsed(body, every, model, max_model_len, is_batch=True)


def _parsed(
    body: ChatFields,
    conversations: list[Conversation],
    model: ServedModel,
    max_model_len: int,
    *,
    is_batch: bool = False,
    blame: Blame | None = None,
) -> GenerationRequest:
    stop = model.check_fields(body)
    logprobs = 0 if body.logprobs else None
    if body.top_logprobs is not None:
        if logprobs is None:
            raise invalid_field("top_logprobs", "needs logprobs to be true")
        logprobs = body.top_logprobs
    logprobs = model.scored(body.logprob_token_ids, logprobs, "top_logprobs")
    if body.structured_outputs is not None and isinstance(body.tool_choice, NamedTool):
        raise invalid_field("structured_outputs", "cannot be combined with a named tool")
    scores_field = "top_logprobs" if body.top_logprobs else "logprobs"
    if body.logprob_token_ids:
        scores_field = "logprob_token_ids"
    of_prompt = body.prompt_logprobs
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = GenerationRequest(
        fields=body,
        conversations=conversations,
        is_batch=is_batch,
        max_model_len=max_model_len,
        n=body.n or 1,
        best_of=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=stop,
        logprobs=logprobs,
        repeats_prompt=bool(body.return_token_ids or of_prompt is not None or body.echo),
        scores=0 if body.stream or logprobs is None else 1 + logprobs,
        prompt_scores=0 if of_prompt is None else 1 + of_prompt,
        tokens_field=limit,
        scores_field=scores_field,
        blame=blame,
    )
    check_size(request)
    return request


def conversation(request: ChatFields, messages: list[ChatMessage]) -> Conversation:
    """Return one conversation of a request, with its constraints on the answer."""
    named: JsonObject = {
        "reasoning_effort": request.reasoning_effort,
        "verbosity": request.verbosity,
    }
    budget, thinking = request.thinking_token_budget, request.thinking
    if thinking is not None:  # templates use either name
        thinks = thinking.type != "disabled"
        named |= {"enable_thinking": thinks, "thinking": thinks}
        named["clear_thinking"] = thinking.clear_thinking
        budget = thinking.budget_tokens if budget is None else budget
    given = {name: value for name, value in named.items() if value is not None}
    arguments = request.chat_template_kwargs
    return Conversation(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        documents=request.documents,
        template=request.chat_template,
        template_arguments={**given, **(arguments or {})} if given else arguments,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        show_reasoning=request.include_reasoning is not False,
        thinking_budget=None if budget is None or budget < 0 else max(1, budget),
        echo=bool(request.echo),
    )
