"""From a validated body to what the engines get: prompts as token ids, sampling, limits."""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import GrammarSpec, LarkGrammar, SamplingParams
from server.access.budget import AnswerSize, room_for_output
from server.answer.formats import AnswerFormats
from server.answer.plan import AnswerPlan
from server.answer.reasoning import ReasoningTags
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import CompletionRequest
from server.api.shared.fields import JsonObject, SamplingFields
from server.generate.checks import Limits, chat_size, completion_size, stop_strings
from server.generate.fold import FoldOptions, Prompt
from server.generate.prompts import completion_prompts, text_prompt
from server.generate.run import GenerationSpec
from server.generate.sampling import bad_word_tokens, sampling_params
from server.generate.structured_outputs import check_copies, requested_grammar
from server.http.errors import context_length_exceeded, invalid
from server.text.conversation import echoed_text, render_chat
from server.text.tokenizer import ServedTokenizer
from server.tool_calls.choice import ToolUse, tool_use
from server.tool_calls.injection import told

KEPT_FOR_FORM = 1024
"""Of the tokens to generate, at most so many and at most a quarter are kept from reasoning for an
answer that has to have a form."""


async def prepare_completion(
    request: CompletionRequest, request_id: str, tokenizer: ServedTokenizer, limits: Limits
) -> GenerationSpec:
    """Return what to generate for a completion request.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    grammar = await requested_grammar(request, limits.grammars)
    size = completion_size(request)
    if grammar is not None:
        check_copies(grammar, size.sequences)
    bad_words = await bad_word_tokens(request, size.sequences, tokenizer)
    prompts = await completion_prompts(request, tokenizer, limits)
    max_tokens = _max_tokens(
        prompts,
        size,
        limits,
        default=tokenizer.sampling_defaults.max_new_tokens or 16,
        of_prompt="prompt",
    )
    n, best_of = request.n or 1, size.copies
    logprobs, scoring_only = request.logprobs, request.max_tokens == 0
    sampling = sampling_params(request, tokenizer, max_tokens, logprobs, bad_words)
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
        names_ids=bool(request.return_tokens_as_token_ids),
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
    tools = _tool_use(request, formats)
    grammar, any_text = await _chat_grammar(request, tools, tokenizer, limits)
    text = await _rendered(request, tools, tokenizer, formats)
    plan = _answer_plan(request, tools, formats, text, tokenizer)
    size = chat_size(request)
    bad_words = await bad_word_tokens(request, size.sequences, tokenizer)
    prompt = await text_prompt(
        text,
        request,
        tokenizer,
        limits,
        add_special_tokens=bool(request.add_special_tokens),
        name="messages",
    )
    if not prompt.token_ids:
        raise invalid("messages: the rendered conversation has no tokens", "messages")
    max_tokens = _max_tokens(
        [prompt],
        size,
        limits,
        default=tokenizer.sampling_defaults.max_new_tokens or limits.max_model_len,
        of_prompt="messages",
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = sampling_params(request, tokenizer, max_tokens, logprobs, bad_words)
    budget = request.thinking_token_budget
    budget = None if budget is None or budget < 0 or plan.reasoning is None else max(1, budget)
    if budget is not None and grammar is None:
        grammar = ANY_TOKENS
    if grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
        if plan.reasoning is not None and (budget is not None or not any_text):
            plan, sampling = _reasoning_first(plan, plan.reasoning, sampling, text, budget)
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
        names_ids=bool(request.return_tokens_as_token_ids),
    )
    return spec, plan


async def conversation_text(
    request: ChatCompletionRequest, tokenizer: ServedTokenizer, formats: AnswerFormats
) -> str:
    """Return the text of a conversation as the model reads it.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    return await _rendered(request, _tool_use(request, formats), tokenizer, formats)


def _tool_use(request: ChatCompletionRequest, formats: AnswerFormats) -> ToolUse:
    parallel = request.parallel_tool_calls is not False
    return tool_use(request.tools, request.tool_choice, formats, parallel=parallel)


async def _rendered(
    request: ChatCompletionRequest,
    tools: ToolUse,
    tokenizer: ServedTokenizer,
    formats: AnswerFormats,
) -> str:
    return await render_chat(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=tools.shown,
        told=told if formats.tells_tools else None,
        documents=request.documents,
        arguments=_template_arguments(request),
    )


ANY_TOKENS = LarkGrammar("start: <[*]>*")
"""Holds an answer to nothing: it is for what a grammar may have before it."""


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


def _reasoning_first(
    plan: AnswerPlan,
    tags: ReasoningTags,
    sampling: SamplingParams,
    prompt: str,
    budget: int | None,
) -> tuple[AnswerPlan, SamplingParams]:
    """Let reasoning come before what a grammar holds the answer to.

    A model that the prompt puts inside the reasoning leaves it by the end tag, early enough for the
    rest. Any other may open it, and is held to the grammar at once if it does not. Tags that are
    no tokens of the model are none that it was trained to write.
    """
    opened = prompt.rstrip().endswith(tags.start) or plan.reasoning_end is not None
    inside = plan.begins_inside and opened
    end = (plan.tools.forced and tags.end_before_calls) or tags.end
    kept = min(sampling.max_tokens // 4, KEPT_FOR_FORM)
    sampling = msgspec.structs.replace(
        sampling,
        grammar_after=end,
        grammar_opening="" if inside else tags.start,
        grammar_budget=min(max(1, sampling.max_tokens - kept), budget or sampling.max_tokens),
    )
    return msgspec.structs.replace(plan, begins_inside=inside), sampling


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
    channels = formats.calls if formats.calls and formats.calls.channels else None
    return AnswerPlan(
        tools=tools,
        reasoning=tags,
        reasoning_end=None if tags is None else tokenizer.token_to_id(tags.end),
        channels=channels,
        begins_inside=bool(inside),
        show_reasoning=request.include_reasoning is not False,
        reasoning_field=formats.reasoning_field,
        echo=echoed_text(request.messages, request.n or 1) if request.echo else "",
    )


def _max_tokens(
    prompts: Sequence[Prompt],
    size: AnswerSize,
    limits: Limits,
    *,
    default: int,
    of_prompt: str,
) -> int:
    """Return how many tokens to generate; a default is cut to what fits, a wish is not.

    `of_prompt` is the field of the prompt: it or the wish is blamed for what is too long.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    asked = size.max_tokens
    if longest + (asked or 1) > limits.max_model_len:
        param = of_prompt if longest >= limits.max_model_len else size.tokens_field
        raise context_length_exceeded(limits.max_model_len, longest, asked or 1, param)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    room = room_for_output(size, prompt_tokens, limits.max_model_len)
    return asked or min(default, limits.max_model_len - longest, room)


def _fold_options(request: SamplingFields, sampling: SamplingParams, logprobs: bool) -> FoldOptions:
    return FoldOptions(
        skip_special_tokens=request.skip_special_tokens is not False,
        stop=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
