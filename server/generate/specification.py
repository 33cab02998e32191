"""Parameters of generation for a request: prompts, sampling, and parsing of answers."""

import re
import secrets
from typing import TypeVar

import msgspec

from engine.shared.messages import GrammarSpec, LarkGrammar, SamplingParams
from server.answer.reader import AnswerPlan
from server.answer.tool_choice import ToolUse, tool_use
from server.errors import context_length_exceeded, invalid, invalid_field
from server.generate.beams import beams_of, check_candidates
from server.generate.budget import check_named_tokens, room_for_output
from server.generate.conversation import echo_of, rendered
from server.generate.model import ServedModel
from server.generate.prompts import prompts_of
from server.generate.request import Conversation, GenerationRequest
from server.generate.structured_outputs import check_copies, requested_grammar
from server.schema.fields import SamplingFields
from server.text.tokenizer import ServedTokenizer, check_vocabulary

T = TypeVar("T")

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


async def sampling_params(
    request: GenerationRequest,
    tokenizer: ServedTokenizer,
    max_tokens: int,
    grammar: GrammarSpec | None,
) -> SamplingParams:
    """Return the sampling parameters; unset fields get the model's defaults.

    The grammar applies from the first token.

    Raises:
        ApiError: a field is invalid; `param` names it.
    """
    fields, defaults = request.fields, tokenizer.sampling_defaults
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens", f"{min_tokens} is more than max_tokens, which is {max_tokens}"
        )
    logprobs, prompt_logprobs = request.logprobs, fields.prompt_logprobs
    if logprobs is None and request.best_of > request.n:
        logprobs = 0  # needed to select the best sequences
    elif request.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        seed_given=fields.seed is not None,
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=max(0, _or(fields.top_k, defaults.top_k)),
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=_token_ids(fields.stop_token_ids, tokenizer, "stop_token_ids") or (),
        logit_bias=_logit_bias(fields.logit_bias, tokenizer) if fields.logit_bias else {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=_token_ids(fields.allowed_token_ids, tokenizer, "allowed_token_ids"),
        logprob_token_ids=tuple(fields.logprob_token_ids or ()),
        bad_words=await bad_word_tokens(fields, request.num_sequences, tokenizer),
    )


async def bad_word_tokens(
    request: SamplingFields, sequences: int, tokenizer: ServedTokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words, at the start of a text and after a space.

    Raises:
        ApiError: a word has no tokens, or all words together have too many for all sequences.
    """
    if not request.bad_words:
        return ()
    stripped = [word.lstrip() for word in request.bad_words]
    if "" in stripped:
        index = stripped.index("")
        raise invalid(f"bad_words[{index}]: must not be empty", "bad_words")
    bare = list(dict.fromkeys(stripped))
    encoded = await tokenizer.encode_many_async(
        [*bare, *[" " + word for word in bare]], add_special_tokens=False
    )
    found: dict[tuple[int, ...], None] = {}
    for first, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        found[tuple(first)] = None
        # A separate space token only precedes the word, whose tokens are already banned.
        if len(spaced) == len(first) and spaced[:1] != first[:1]:
            found[tuple(spaced)] = None
    check_named_tokens(request, sequences, sum(map(len, found)))
    return tuple(found)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _token_ids(
    token_ids: list[int] | None, tokenizer: ServedTokenizer, field: str
) -> tuple[int, ...] | None:
    if not token_ids:
        return None
    check_vocabulary(token_ids, tokenizer.vocab_size, field)
    return tuple(sorted(set(token_ids)))


def _logit_bias(bias: dict[str, float], tokenizer: ServedTokenizer) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= tokenizer.vocab_size:
            size = tokenizer.vocab_size
            raise invalid_field(
                "logit_bias", f"{key!r} is not a token id of the vocabulary ({size} tokens)"
            )
        found[int(key)] = value
    return found


RESERVED_FOR_FORM = 1024
"""Maximum tokens reserved for the constrained part of an answer; at most a quarter of all its
tokens."""

ANY_TOKENS = LarkGrammar("start: <[*]>*")
"""Matches any text: stands for free text before a grammar."""

NO_TOOLS = ToolUse()


async def specify(request: GenerationRequest, model: ServedModel) -> None:
    """Compute prompts, sampling parameters and answer plan: the last section of the request.

    Raises:
        ApiError: the request is invalid; `param` names the field.
    """
    fields, source = request.fields, request.conversation
    request.beams = beams = beams_of(fields, request.best_of)
    if beams is not None:
        named, of_model = {*(fields.stop_token_ids or ())}, model.tokenizer.eos_token_ids
        check_candidates(beams, request.num_prompts, len(named - of_model), len(of_model))
    tools, grammar, whole = await _form(request, model)
    echo = ""
    if source is not None and source.echo and not request.is_batch:
        echo = echo_of(source.messages, request.n)
    request.prompts, text = await prompts_of(request, tools, model)
    max_tokens = _max_tokens(request, model.tokenizer)
    sampling = await sampling_params(request, model.tokenizer, max_tokens, grammar)
    if source is not None:
        # Whether reasoning, if any, has to end early enough for constrained text after it.
        ends = source.thinking_budget is not None or (grammar is not None and whole)
        plan = request.plan = _answer_plan(source, tools, text, model, ends=ends, echo=echo)
        if ends and plan.reasoning is not None:
            sampling = _reasoning_first(sampling, plan, source.thinking_budget)
    request.sampling = sampling
    hidden, markers = fields.skip_special_tokens is not False, request.plan.markers
    request.skip_special_tokens = hidden and not any(map(model.tokenizer.is_special_text, markers))


async def _form(
    request: GenerationRequest, model: ServedModel
) -> tuple[ToolUse, GrammarSpec | None, bool]:
    """Return the use of tools, and the grammar of the answers.

    The last element is true if the grammar covers the whole answer, not only calls within text.
    """
    source, tenant, require = request.conversation, request.tenant, model.grammars
    requested = requested_grammar(request.fields, closes_objects=model.formats.closes_objects)
    answer = None if requested is None else await require.require(*requested, tenant)
    if answer is not None and (source is None or request.is_batch):
        check_copies(answer, request.num_sequences)
    tools = NO_TOOLS if source is None else _tools(source, model)
    if not tools.shown:
        return tools, answer, answer is not None
    for schema, param in tools.schemas:
        await require.require(schema, param, tenant)
    grammar = tools.grammar(answer, model.tokenizer.is_special_text)
    if grammar is not None and grammar is not answer:
        await require.require(grammar, "tools", tenant)
    return tools, grammar, answer is not None or tools.forced


def _tools(source: Conversation, model: ServedModel) -> ToolUse:
    if not source.tools and source.tool_choice is None:
        return NO_TOOLS
    return tool_use(
        source.tools, source.tool_choice, model.formats, parallel=source.parallel_tool_calls
    )


async def conversation_text(source: Conversation, model: ServedModel) -> str:
    """Return the rendered prompt text of a conversation.

    Raises:
        ApiError: the request is invalid; `param` names the field.
    """
    return await rendered(source, _tools(source, model), model)


def _answer_plan(
    source: Conversation,
    tools: ToolUse,
    text: str,
    model: ServedModel,
    *,
    ends: bool,
    echo: str,
) -> AnswerPlan:
    """Return how answers are split into parts.

    If the prompt ends inside reasoning, the model leaves it with the end tag. Otherwise, if
    something must follow the reasoning (`ends`), the model either opens reasoning or starts with
    what follows. Tags that are not single tokens of the model are ones it was not trained on.
    """
    tags, formats, end, inside = None, model.formats, None, False
    if formats.reasoning is not None:
        opening = formats.reasoning.opening(text, continues=source.continue_final_message)
        if opening is not None:
            tags, inside = formats.reasoning, opening
            end = model.tokenizer.token_to_id(tags.end)
            if ends and end is None:
                inside = inside and text.rstrip().endswith(tags.start)
    channels = formats.calls if formats.calls and formats.calls.channels else None
    return AnswerPlan(
        tools=tools,
        reasoning=tags,
        reasoning_end=end,
        channels=channels,
        begins_inside=inside,
        may_call_at_once=not ends,
        show_reasoning=source.show_reasoning,
        reasoning_field=formats.reasoning_field,
        echo=echo,
    )


def _reasoning_first(
    sampling: SamplingParams, plan: AnswerPlan, thinking_budget: int | None
) -> SamplingParams:
    """Allow reasoning before the grammar applies, limited so that tokens remain for the rest."""
    tags, max_tokens = plan.reasoning, sampling.max_tokens
    assert tags is not None, "there is no reasoning otherwise"
    reserved = min(max_tokens // 4, RESERVED_FOR_FORM)
    return msgspec.structs.replace(
        sampling,
        grammar=sampling.grammar or ANY_TOKENS,
        grammar_after=(plan.tools.forced and tags.end_before_calls) or tags.end,
        grammar_opening="" if plan.begins_inside else tags.start,
        grammar_budget=min(max(1, max_tokens - reserved), thinking_budget or max_tokens),
    )


def _max_tokens(request: GenerationRequest, tokenizer: ServedTokenizer) -> int:
    """Return the maximum tokens to generate; a default is reduced to what fits.

    If the requested number does not fit, the error names the prompt's field or the field of the
    number of tokens.
    """
    max_len, requested = request.max_model_len, request.max_tokens
    longest = max([len(prompt.token_ids) for prompt in request.prompts])
    if longest + (requested or 1) > max_len:
        param = (
            ("messages" if request.conversations else "prompt")
            if longest >= max_len
            else request.tokens_field
        )
        raise context_length_exceeded(max_len, longest, requested or 1, param)
    room = room_for_output(request, request.num_prompt_tokens)
    default = tokenizer.sampling_defaults.max_new_tokens or request.default_tokens or max_len
    return requested or min(default, max_len - longest, room)
