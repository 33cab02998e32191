"""From a request to what is generated for it: prompts, sampling, how answers are read."""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import GrammarSpec, LarkGrammar, SamplingParams
from server.answer.plan import AnswerPlan
from server.answer.tool_choice import ToolUse, tool_use
from server.errors import context_length_exceeded
from server.generate.beams import beams_of, check_candidates
from server.generate.budget import room_for_output
from server.generate.model import ServedModel
from server.generate.prompts import echo_of, prompts_of, rendered
from server.generate.request import Conversation, GenerationRequest
from server.generate.sampling import sampling_params
from server.generate.structured_outputs import check_copies, requested_grammar
from server.text.tokenizer import ServedTokenizer

RESERVED_FOR_FORM = 1024
"""Maximum tokens reserved for the constrained part of an answer; at most a quarter of all its
tokens."""

ANY_TOKENS = LarkGrammar("start: <[*]>*")
"""Matches any text: the prefix of a grammar that free text may precede."""

NO_TOOLS = ToolUse()


async def specify(request: GenerationRequest, model: ServedModel) -> None:
    """Work out what to generate for a request: the last part of its attributes.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    fields, source = request.fields, request.conversation
    request.beams = beams = beams_of(fields, request.best_of)
    if beams is not None:
        named, of_model = {*(fields.stop_token_ids or ())}, model.tokenizer.eos_token_ids
        check_candidates(beams, request.num_prompts, len(named - of_model), len(of_model))
    tools, grammar, whole = await _form(request, model)
    echo = ""
    if source is not None and source.echo and not request.is_batch:
        echo = echo_of(source, request.n)
    request.prompts, text = await prompts_of(request, tools, model)
    max_tokens = _max_tokens(request, model.tokenizer)
    sampling = await sampling_params(request, model.tokenizer, max_tokens, grammar)
    if source is not None:
        # Whether reasoning, if there is any, has to end for something that follows it.
        ends = source.thinking_budget is not None or (grammar is not None and whole)
        plan = request.plan = _answer_plan(source, tools, text, model, ends=ends, echo=echo)
        if ends and plan.reasoning is not None:
            sampling = _reasoning_first(sampling, plan, source.thinking_budget)
    request.sampling = sampling
    hidden, markers = fields.skip_special_tokens is not False, request.plan.markers
    request.skip_special_tokens = hidden and not _has_special(markers, model.tokenizer)


async def _form(
    request: GenerationRequest, model: ServedModel
) -> tuple[ToolUse, GrammarSpec | None, bool]:
    """Return what a request does with its tools, and the grammar that its answers follow.

    The last item says whether the grammar covers all of an answer, not only the calls in any text.
    """
    source, tenant, require = request.conversation, request.tenant, model.grammars
    wanted = requested_grammar(request.fields, closes_objects=model.formats.closes_objects)
    answer = None if wanted is None else await require.require(*wanted, tenant)
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
    """Return the text of a conversation as the model reads it.

    Raises:
        ApiError: the request is wrong; `param` names the field.
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
    """Return how answers are taken apart.

    If the prompt ends inside the reasoning, the model leaves it with the end tag. Otherwise, where
    something must follow the reasoning (`ends`), the model either opens reasoning or starts with
    what follows. Tags that are not tokens of the model are tags that it was not trained on.
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
    """Let reasoning come before what the grammar covers, and end early enough for that."""
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


def _has_special(markers: Sequence[str], tokenizer: ServedTokenizer) -> bool:
    return any([tokenizer.is_special_text(marker) for marker in markers])


def _max_tokens(request: GenerationRequest, tokenizer: ServedTokenizer) -> int:
    """Return how many tokens to generate; a default is cut to what fits.

    If what the client asks for does not fit, the error names the prompt's field or that of the
    number of tokens.
    """
    max_len, asked = request.max_model_len, request.max_tokens
    longest = max([len(prompt.token_ids) for prompt in request.prompts])
    if longest + (asked or 1) > max_len:
        param = request.prompt_field if longest >= max_len else request.tokens_field
        raise context_length_exceeded(max_len, longest, asked or 1, param)
    room = room_for_output(request, request.num_prompt_tokens)
    default = tokenizer.sampling_defaults.max_new_tokens or request.default_tokens or max_len
    return asked or min(default, max_len - longest, room)
