"""A chat completion request in the terms of all requests."""

from collections.abc import Callable

from server.access.budget import AnswerSize, check_size
from server.api.chat.schema import ChatCompletionRequest
from server.api.shared.body import JsonObject
from server.api.shared.checks import check_fields
from server.api.shared.tools import NamedTool
from server.generate.request import Conversation, GenerationRequest, Limits
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
    stop = check_fields(request, limits)
    logprobs = 0 if request.logprobs else None
    if request.top_logprobs is not None:
        if logprobs is None:
            raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
        logprobs = limits.alternatives(request.top_logprobs, "top_logprobs")
    if request.structured_outputs is not None and isinstance(request.tool_choice, NamedTool):
        raise invalid(
            "structured_outputs: the chosen tool says what the answer is", "structured_outputs"
        )
    if request.functions is not None:
        raise invalid("functions: use tools instead", "functions")
    if request.function_call is not None:
        raise invalid("function_call: use tool_choice instead", "function_call")
    size = _size(request, logprobs)
    check_size(size, request, 0, limits.max_model_len)
    return GenerationRequest(
        fields=request,
        source=conversation(request),
        size=size,
        n=size.copies,
        stop=stop,
        logprobs=logprobs,
        default_tokens=None,
        blame=blame,
    )


def conversation(request: ChatCompletionRequest) -> Conversation:
    """Return the conversation of a request, and what its answers may consist of."""
    budget = request.thinking_token_budget
    return Conversation(
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        documents=request.documents,
        template_arguments=_template_arguments(request),
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        show_reasoning=request.include_reasoning is not False,
        thinking_budget=None if budget is None or budget < 0 else max(1, budget),
        echo=bool(request.echo),
    )


def _template_arguments(request: ChatCompletionRequest) -> JsonObject | None:
    effort, arguments = request.reasoning_effort, request.chat_template_kwargs
    return arguments if effort is None else {"reasoning_effort": effort, **(arguments or {})}


def _size(request: ChatCompletionRequest, logprobs: int | None) -> AnswerSize:
    of_prompt = request.prompt_logprobs
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return AnswerSize(
        prompts=1,
        copies=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        repeats_prompt=bool(request.return_token_ids or of_prompt is not None or request.echo),
        scores=0 if request.stream or logprobs is None else 1 + logprobs,
        prompt_scores=0 if of_prompt is None else 1 + of_prompt,
        tokens_field=field,
        scores_field="top_logprobs" if request.top_logprobs else "logprobs",
    )
