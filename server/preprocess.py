"""From a validated body to what the engines get: prompts as token ids, sampling, limits."""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import GrammarSpec, SamplingParams
from server.answer.formats import AnswerFormats
from server.answer.plan import AnswerPlan
from server.conversation import render_chat
from server.errors import context_length_exceeded, invalid
from server.generation import FoldOptions, Prompt
from server.limits import MAX_SEQUENCES
from server.sampling import check_prompt_logprobs, check_vocabulary, sampling_params
from server.schemas.chat import ChatCompletionRequest
from server.schemas.common import JsonObject, SamplingFields
from server.schemas.completions import CompletionRequest
from server.structured_outputs import GrammarCheck, check_copies, requested_grammar
from server.submission import GenerationSpec
from server.text.tokenizer import ServedTokenizer
from server.tool_calls.choice import ToolUse, tool_use


class Limits(msgspec.Struct, frozen=True):
    """What requests are held against."""

    max_model_len: int
    max_logprobs: int
    grammars: GrammarCheck


async def prepare_completion(
    request: CompletionRequest, request_id: str, tokenizer: ServedTokenizer, limits: Limits
) -> GenerationSpec:
    """Return what to generate for a completion request.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    _check_completion(request, limits)
    grammar = await requested_grammar(request, limits.grammars)
    prompts = await _completion_prompts(request, tokenizer, limits)
    sequences = len(prompts) * (request.best_of or request.n or 1)
    _check_sequences(sequences)
    if grammar is not None:
        check_copies(grammar, sequences)
    scoring_only = request.max_tokens == 0
    max_tokens = _max_tokens(
        prompts,
        1 if scoring_only else request.max_tokens,
        limits,
        default=tokenizer.sampling_defaults.max_new_tokens or 16,
        params=("prompt", "max_tokens"),
    )
    n, best_of = request.n or 1, request.best_of or request.n or 1
    logprobs = request.logprobs
    sampling = sampling_params(request, tokenizer, max_tokens, logprobs)
    if grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    if logprobs is None and best_of > n:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if request.echo and logprobs is not None:
        most = max(logprobs, request.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=most)
    fold = _fold_options(request, sampling, logprobs is not None)
    if request.echo:
        fold = msgspec.structs.replace(
            fold, echo=True, echo_logprobs=logprobs or 0, discard_output=scoring_only
        )
    return GenerationSpec(
        request_id=request_id,
        prompts=prompts,
        sampling=sampling,
        fold=fold,
        n=n,
        best_of=best_of,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )


async def prepare_chat(
    request: ChatCompletionRequest,
    request_id: str,
    tokenizer: ServedTokenizer,
    limits: Limits,
    formats: AnswerFormats,
) -> tuple[GenerationSpec, AnswerPlan]:
    """Return what to generate for a chat completion request, and how its answers are read.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    _check_chat(request, limits)
    tools = tool_use(
        request.tools,
        request.tool_choice,
        formats,
        parallel=request.parallel_tool_calls is not False,
    )
    grammar, any_text = await _chat_grammar(request, tools, tokenizer, limits)
    text = render_chat(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=tools.shown,
        documents=request.documents,
        arguments=_template_arguments(request),
    )
    plan = _answer_plan(request, tools, formats, text, tokenizer)
    prompt = await _text_prompt(
        text, request, tokenizer, limits, add_special_tokens=bool(request.add_special_tokens)
    )
    if not prompt.token_ids:
        raise invalid("messages: the rendered conversation has no tokens", "messages")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = _max_tokens(
        [prompt],
        request.max_completion_tokens or request.max_tokens,
        limits,
        default=tokenizer.sampling_defaults.max_new_tokens or limits.max_model_len,
        params=("messages", param),
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = sampling_params(request, tokenizer, max_tokens, logprobs)
    if grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
        if plan.reasoning is not None and not any_text:
            # What has to come before the end tag is reasoning, whether or not it was opened.
            sampling = msgspec.structs.replace(sampling, grammar_after=plan.reasoning.end)
            plan = msgspec.structs.replace(plan, begins_inside=True)
    fold = _fold_options(request, sampling, logprobs is not None)
    if any(map(tokenizer.is_special_text, plan.markers)):
        fold = msgspec.structs.replace(fold, skip_special_tokens=False)
    n = request.n or 1
    spec = GenerationSpec(
        request_id=request_id,
        prompts=[prompt],
        sampling=sampling,
        fold=fold,
        n=n,
        best_of=n,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    return spec, plan


async def _chat_grammar(
    request: ChatCompletionRequest, tools: ToolUse, tokenizer: ServedTokenizer, limits: Limits
) -> tuple[GrammarSpec | None, bool]:
    """Return what holds the answer to calls of tools, or to the form that the request names.

    The second is whether the answer may be any text, in which only calls are held to something.
    """
    answer = await requested_grammar(request, limits.grammars)
    for spec, param in tools.schemas:
        await limits.grammars.require(spec, param)
    grammar = tools.grammar(answer, tokenizer.is_special_text)
    if grammar is not None and grammar is not answer:
        await limits.grammars.require(grammar, "tools")
    return grammar, answer is None and not tools.forced


def _template_arguments(request: ChatCompletionRequest) -> JsonObject | None:
    effort, arguments = request.reasoning_effort, request.chat_template_kwargs
    return arguments if effort is None else {"reasoning_effort": effort, **(arguments or {})}


def _answer_plan(
    request: ChatCompletionRequest,
    tools: ToolUse,
    formats: AnswerFormats,
    prompt: str,
    tokenizer: ServedTokenizer,
) -> AnswerPlan:
    inside = None
    if formats.reasoning is not None:
        continues = bool(request.continue_final_message)
        inside = formats.reasoning.opening(prompt, continues=continues)
    tags = None if inside is None else formats.reasoning
    return AnswerPlan(
        tools=tools,
        reasoning=tags,
        reasoning_end=None if tags is None else tokenizer.token_to_id(tags.end),
        begins_inside=bool(inside),
        show_reasoning=request.include_reasoning is not False,
    )


# -- checks --------------------------------------------------------------------------------------


def _check_completion(request: CompletionRequest, limits: Limits) -> None:
    _check_common(request, limits)
    if request.suffix:
        raise invalid("suffix: infilling is not supported", "suffix")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: must be at least 1 unless echo is set", "max_tokens")
    if request.logprobs is not None and request.logprobs > limits.max_logprobs:
        raise invalid(f"logprobs: at most {limits.max_logprobs} are served", "logprobs")
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise invalid("best_of: must not be less than n", "best_of")
        if request.stream and request.best_of > (request.n or 1):
            raise invalid("best_of: must equal n in a stream", "best_of")


def _check_chat(request: ChatCompletionRequest, limits: Limits) -> None:
    _check_common(request, limits)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    if (request.top_logprobs or 0) > limits.max_logprobs:
        raise invalid(f"top_logprobs: at most {limits.max_logprobs} are served", "top_logprobs")
    if request.functions is not None:
        raise invalid("functions: use tools instead", "functions")
    if request.function_call is not None:
        raise invalid("function_call: use tool_choice instead", "function_call")


def _check_common(request: SamplingFields, limits: Limits) -> None:
    check_prompt_logprobs(request, limits.max_logprobs)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed when stream is true", "stream_options")
    if "" in _stop_strings(request):
        raise invalid("stop: strings must not be empty", "stop")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")


def _check_sequences(count: int) -> None:
    if count > MAX_SEQUENCES:
        raise invalid(
            f"prompt: {count} sequences (prompts times choices), more than {MAX_SEQUENCES}",
            "prompt",
        )


# -- prompts -------------------------------------------------------------------------------------


def num_prompts(source: str | Sequence[Any]) -> int:
    """Return how many prompts the prompt field of a completion request holds."""
    return 1 if isinstance(source, str) or isinstance(source[0], int) else len(source)


async def _completion_prompts(
    request: CompletionRequest, tokenizer: ServedTokenizer, limits: Limits
) -> list[Prompt]:
    add_special_tokens = request.add_special_tokens is not False
    source = request.prompt
    items: list[Any] = [source]
    if not isinstance(source, str) and not isinstance(source[0], int):
        items = list(source)
    prompts = []
    for index, item in enumerate(items):
        name = "prompt" if len(items) == 1 else f"prompt[{index}]"
        if isinstance(item, str):
            prompt = await _text_prompt(
                item, request, tokenizer, limits, add_special_tokens=add_special_tokens
            )
        else:
            check_vocabulary(item, tokenizer, name)
            prompt = Prompt(_truncated(item, request, limits), None)
        if not prompt.token_ids:
            raise invalid(f"{name}: must not be empty", "prompt")
        prompts.append(prompt)
    return prompts


async def _text_prompt(
    text: str,
    request: SamplingFields,
    tokenizer: ServedTokenizer,
    limits: Limits,
    *,
    add_special_tokens: bool,
) -> Prompt:
    token_ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    kept = _truncated(token_ids, request, limits)
    return Prompt(kept, text if len(kept) == len(token_ids) else None)


def _truncated(token_ids: list[int], request: SamplingFields, limits: Limits) -> list[int]:
    """Return the last tokens that the request wants to keep; -1 leaves room for one more."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    return token_ids[-(limits.max_model_len - 1 if keep == -1 else keep) :]


def _max_tokens(
    prompts: Sequence[Prompt],
    asked: int | None,
    limits: Limits,
    *,
    default: int,
    params: tuple[str, str],
) -> int:
    """Return how many tokens to generate; a default is cut to what fits, a wish is not.

    `params` are the fields of the prompt and of the wish: what is too long is blamed.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + (asked or 1) > limits.max_model_len:
        of_prompt, of_wish = params
        param = of_prompt if longest >= limits.max_model_len else of_wish
        raise context_length_exceeded(limits.max_model_len, longest, asked or 1, param)
    return asked or min(default, limits.max_model_len - longest)


# -- sampling ------------------------------------------------------------------------------------


def _stop_strings(request: SamplingFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _fold_options(request: SamplingFields, sampling: SamplingParams, logprobs: bool) -> FoldOptions:
    return FoldOptions(
        skip_special_tokens=request.skip_special_tokens is not False,
        stop=_stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
