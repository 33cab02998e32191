"""From a request to what is generated for it: prompts as token ids, sampling, how answers are read.

A specification is built once, as a whole: each part of it is worked out before it is made.
"""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import GrammarSpec, LarkGrammar, SamplingParams
from server.access.budget import room_for_output
from server.answer.plan import AnswerPlan
from server.generate.beams import Beams, beams_of, check_candidates
from server.generate.fold import FoldOptions, Prompt
from server.generate.model import ServedModel
from server.generate.prompts import Prompts, prompts_of, rendered
from server.generate.request import Conversation, GenerationRequest, Limits
from server.generate.sampling import HeldTo, sampling_params
from server.generate.structured_outputs import check_copies, requested_grammar
from server.http.errors import context_length_exceeded
from server.text.tokenizer import ServedTokenizer
from server.tool_calls.choice import ToolUse, tool_use

KEPT_FOR_FORM = 1024
"""Of the tokens to generate, at most so many and at most a quarter are kept from reasoning for an
answer that has to have a form."""

ANY_TOKENS = LarkGrammar("start: <[*]>*")
"""Holds an answer to nothing: it is for what a grammar may have before it."""


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate, and how answers are read and shown.

    `sampling` holds for every sequence but for the seed: sequence i draws with seed + i.
    """

    request_id: str
    prompts: list[Prompt]
    sampling: SamplingParams
    fold: FoldOptions
    plan: AnswerPlan
    """How answers are taken apart into reasoning, content and tool calls."""
    n: int = 1
    best_of: int = 1
    """Sequences per prompt, of which the n best are shown."""
    priority: int = 0
    cache_salt: str | None = None
    """What the client wants its cached prompts to be set apart by."""
    beams: Beams | None = None
    """How to search for answers instead of drawing them."""
    names_ids: bool = False
    """Whether scores name tokens by their ids, not their texts."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def num_tokens_sent(self) -> int:
        """Tokens that engines are sent for all sequences: those of beams come at each step."""
        found = self.best_of * self.num_prompt_tokens
        if self.beams is not None:
            found += self.best_of * len(self.prompts) * self.sampling.max_tokens
        return found


class _Form(msgspec.Struct, frozen=True):
    """What answers are held to."""

    tools: ToolUse
    grammar: GrammarSpec | None
    whole: bool
    """Whether the grammar holds all of an answer, not only the calls in any text."""


async def specify(
    request: GenerationRequest, request_id: str, model: ServedModel, limits: Limits
) -> GenerationSpec:
    """Return what to generate for a request.

    Raises:
        ApiError: the request is wrong; `param` names the field.
    """
    fields, source, size = request.fields, request.conversation, request.size
    beams = beams_of(request)
    if beams is not None:
        named, of_model = {*(fields.stop_token_ids or ())}, model.tokenizer.eos_token_ids
        check_candidates(beams, size.prompts, len(named - of_model), len(of_model))
    form = await _form(request, model)
    prompts = await prompts_of(request, form.tools, model, limits)
    max_tokens = _max_tokens(request, prompts.prompts, model.tokenizer, limits)
    plan = AnswerPlan()
    if source is not None:
        plan = _answer_plan(source, form, prompts, model)
    sampling = await sampling_params(
        request, model.tokenizer, max_tokens, _held_to(source, form, plan, max_tokens)
    )
    hidden = fields.skip_special_tokens is not False
    fold = FoldOptions(
        skip_special_tokens=hidden and not _has_special(plan.markers, model.tokenizer),
        stop=request.stop,
        include_stop=bool(fields.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=request.logprobs is not None,
        prompt_logprobs=fields.prompt_logprobs,
        echo=request.echo,
        echo_logprobs=request.logprobs or 0,
        discard_output=request.only_echo,
    )
    return GenerationSpec(
        request_id=request_id,
        prompts=prompts.prompts,
        sampling=sampling,
        fold=fold,
        plan=plan,
        n=request.n,
        best_of=size.copies,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        beams=beams,
        names_ids=bool(fields.return_tokens_as_token_ids),
    )


async def _form(request: GenerationRequest, model: ServedModel) -> _Form:
    """Return what holds answers to calls of tools, or to the form that the request names."""
    source, require = request.conversation, model.grammars
    wanted = requested_grammar(request.fields)
    answer = None if wanted is None else await require.require(*wanted)
    if answer is not None and not isinstance(request.source, Conversation):
        check_copies(answer, request.size.sequences)
    if source is None:
        return _Form(ToolUse(), answer, whole=True)
    tools = _tools(source, model)
    if not tools.shown:
        return _Form(tools, answer, whole=answer is not None)
    for schema, param in tools.schemas:
        await require.require(schema, param)
    grammar = tools.grammar(answer, model.tokenizer.is_special_text)
    if grammar is not None and grammar is not answer:
        await require.require(grammar, "tools")
    return _Form(tools, grammar, whole=answer is not None or tools.forced)


def _tools(source: Conversation, model: ServedModel) -> ToolUse:
    if not source.tools and source.tool_choice is None:
        return ToolUse()
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
    source: Conversation, form: _Form, prompts: Prompts, model: ServedModel
) -> AnswerPlan:
    """Return how answers are taken apart.

    A model that the prompt puts inside the reasoning leaves it by the end tag. Where something is
    to follow the reasoning, any other may open it, and is held to that at once if it does not: tags
    that are no tokens of the model are none that it was trained to write.
    """
    tags, formats, end, inside = None, model.formats, None, False
    if formats.reasoning is not None:
        opening = formats.reasoning.opening(prompts.text, continues=source.continue_final_message)
        if opening is not None:
            tags, inside = formats.reasoning, opening
            end = model.tokenizer.token_to_id(tags.end)
            if _reasoning_first(source, form) and end is None:
                inside = inside and prompts.text.rstrip().endswith(tags.start)
    channels = formats.calls if formats.calls and formats.calls.channels else None
    return AnswerPlan(
        tools=form.tools,
        reasoning=tags,
        reasoning_end=end,
        channels=channels,
        begins_inside=inside,
        may_call_at_once=not _reasoning_first(source, form),
        show_reasoning=source.show_reasoning,
        reasoning_field=formats.reasoning_field,
        echo=prompts.echo,
    )


def _reasoning_first(source: Conversation, form: _Form) -> bool:
    """Whether reasoning, if there is any, has to end for something that follows it."""
    return source.thinking_budget is not None or (form.grammar is not None and form.whole)


def _held_to(source: Conversation | None, form: _Form, plan: AnswerPlan, max_tokens: int) -> HeldTo:
    """Let reasoning come before what a grammar holds the answer to, and end early enough for it."""
    tags = plan.reasoning
    if tags is None or source is None or not _reasoning_first(source, form):
        return HeldTo(form.grammar)
    kept = min(max_tokens // 4, KEPT_FOR_FORM)
    return HeldTo(
        form.grammar or ANY_TOKENS,
        after=(plan.tools.forced and tags.end_before_calls) or tags.end,
        opening="" if plan.begins_inside else tags.start,
        budget=min(max(1, max_tokens - kept), source.thinking_budget or max_tokens),
    )


def _has_special(markers: Sequence[str], tokenizer: ServedTokenizer) -> bool:
    return any([tokenizer.is_special_text(marker) for marker in markers])


def _max_tokens(
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    tokenizer: ServedTokenizer,
    limits: Limits,
) -> int:
    """Return how many tokens to generate; a default is cut to what fits, a wish is not.

    The prompt's field or the wish's is blamed for what is too long.
    """
    size, most = request.size, limits.max_model_len
    longest = max([len(prompt.token_ids) for prompt in prompts])
    asked = size.max_tokens
    if longest + (asked or 1) > most:
        param = request.prompt_field if longest >= most else size.tokens_field
        raise context_length_exceeded(most, longest, asked or 1, param)
    room = room_for_output(size, sum([len(prompt.token_ids) for prompt in prompts]), most)
    default = tokenizer.sampling_defaults.max_new_tokens or request.default_tokens or most
    return asked or min(default, most - longest, room)
