"""A chat completion request in the terms of all requests."""

from collections.abc import Callable

import msgspec

from server.access.budget import AnswerSize, check_size
from server.access.limits import MAX_SHARED
from server.api.chat.schema import BatchChatRequest, ChatCompletionRequest, ChatFields
from server.api.shared.body import JsonObject
from server.api.shared.checks import check_fields
from server.api.shared.messages import ChatMessage
from server.api.shared.tools import NamedTool
from server.generate.request import Conversation, Conversations, GenerationRequest, Limits
from server.http.errors import ApiError, invalid

Blame = Callable[[ApiError], ApiError]


def parse(
    request: ChatCompletionRequest, limits: Limits, blame: Blame | None = None
) -> GenerationRequest:
    """Return what a request asks for, checked as far as that needs no tokens.

    `blame` is for requests that another endpoint took (`GenerationRequest.blame`).

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    return _parsed(request, conversation(request), 1, limits, blame)


def parse_batch(request: BatchChatRequest, limits: Limits) -> GenerationRequest:
    """Return what a request with several conversations asks for, checked to the same extent.

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    every = [_conversation(request, messages) for messages in request.messages]
    for field in ("documents", "chat_template_kwargs"):
        size = len(msgspec.json.encode(getattr(request, field)))
        if size * len(every) > MAX_SHARED:
            raise invalid(
                f"{field}: {size} bytes in each of {len(every)} conversations are more than "
                f"{MAX_SHARED}",
                field,
            )
    return _parsed(request, Conversations(every), len(every), limits)


def _parsed(
    request: ChatFields,
    source: Conversation | Conversations,
    prompts: int,
    limits: Limits,
    blame: Blame | None = None,
) -> GenerationRequest:
    stop = check_fields(request, limits)
    logprobs = 0 if request.logprobs else None
    if request.top_logprobs is not None:
        if logprobs is None:
            raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
        logprobs = request.top_logprobs
    logprobs = limits.scored(request.logprob_token_ids, logprobs, "top_logprobs")
    if request.structured_outputs is not None and isinstance(request.tool_choice, NamedTool):
        raise invalid(
            "structured_outputs: the chosen tool says what the answer is", "structured_outputs"
        )
    size = _size(request, logprobs, prompts)
    check_size(size, request, 0, limits.max_model_len)
    return GenerationRequest(
        fields=request,
        source=source,
        size=size,
        n=size.copies,
        stop=stop,
        logprobs=logprobs,
        default_tokens=None,
        blame=blame,
    )


def conversation(request: ChatCompletionRequest) -> Conversation:
    """Return the conversation of a request, and what its answers may consist of."""
    return _conversation(request, request.messages)


def _conversation(request: ChatFields, messages: list[ChatMessage]) -> Conversation:
    budget = request.thinking_token_budget
    return Conversation(
        messages=messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        documents=request.documents,
        template=request.chat_template,
        template_arguments=_template_arguments(request),
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        show_reasoning=request.include_reasoning is not False,
        thinking_budget=None if budget is None or budget < 0 else max(1, budget),
        echo=bool(request.echo),
    )


def _template_arguments(request: ChatFields) -> JsonObject | None:
    named = {"reasoning_effort": request.reasoning_effort, "verbosity": request.verbosity}
    given = {name: value for name, value in named.items() if value is not None}
    arguments = request.chat_template_kwargs
    return {**given, **(arguments or {})} if given else arguments


def _scores_field(request: ChatFields) -> str:
    if request.logprob_token_ids:
        return "logprob_token_ids"
    return "top_logprobs" if request.top_logprobs else "logprobs"


def _size(request: ChatFields, logprobs: int | None, prompts: int) -> AnswerSize:
    of_prompt = request.prompt_logprobs
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return AnswerSize(
        prompts=prompts,
        copies=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        repeats_prompt=bool(request.return_token_ids or of_prompt is not None or request.echo),
        scores=0 if request.stream or logprobs is None else 1 + logprobs,
        prompt_scores=0 if of_prompt is None else 1 + of_prompt,
        searched=bool(request.use_beam_search),
        tokens_field=field,
        scores_field=_scores_field(request),
    )
