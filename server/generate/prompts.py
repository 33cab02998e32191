"""The prompts of a request as token ids."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from server.access.limits import MAX_ECHO
from server.api.shared.fields import SamplingFields
from server.generate.fold import Prompt
from server.generate.model import ServedModel
from server.generate.request import (
    Conversation,
    Conversations,
    GenerationRequest,
    Limits,
    Texts,
    TokenLists,
)
from server.generate.vocabulary import check_vocabulary
from server.http.errors import ApiError, invalid
from server.text.conversation import render_chat, said_last
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import ServedTokenizer
from server.tool_calls.choice import ToolUse
from server.tool_calls.injection import told

_LONG = 1 << 16
"""Characters of a prompt that is tokenized by itself, not with others."""


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a request; of a conversation also what it was rendered to."""

    prompts: list[Prompt]
    text: str = ""
    """The rendered conversation."""
    echo: str = ""
    """What each answer repeats before it begins."""


async def prompts_of(
    request: GenerationRequest, tools: ToolUse, model: ServedModel, limits: Limits
) -> Prompts:
    """Return the prompts of a request; `tools` are those that its template shows.

    Raises:
        ApiError: they are wrong or too long, or there are too many tokens in a conversation's.
    """
    match request.source:
        case Conversation() as source:
            return await _of_conversation(source, request, tools, model, limits)
        case Conversations() as source:
            return await _of_conversations(source, request, model, limits)
        case Texts() as source:
            prompts = await _of_texts(source, request.fields, model.tokenizer, limits)
        case TokenLists() as source:
            prompts = _of_token_lists(source.token_lists, request.fields, model.tokenizer, limits)
    for index, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise invalid(f"{_prompt_name(index, prompts)}: must not be empty", "prompt")
    return Prompts(prompts)


async def rendered(source: Conversation, tools: ToolUse, model: ServedModel) -> str:
    """Return the text of a conversation; `tools` are those that the template shows.

    Raises:
        ApiError: there is no template, or it does not accept the conversation.
    """
    return await render_chat(
        model.tokenizer,
        source.messages,
        template=source.template,
        templates=model.templates,
        add_generation_prompt=source.add_generation_prompt,
        continue_final_message=source.continue_final_message,
        tools=tools.shown,
        told=told if model.formats.tells_tools else None,
        documents=source.documents,
        arguments=source.template_arguments,
    )


async def _of_conversation(
    source: Conversation,
    request: GenerationRequest,
    tools: ToolUse,
    model: ServedModel,
    limits: Limits,
) -> Prompts:
    async def read(conversation: Conversation) -> Prompts:
        text = await rendered(conversation, tools, model)
        prompt = await _text_prompt(
            text,
            request.fields,
            model.tokenizer,
            limits,
            add_special_tokens=source.add_special_tokens,
            name="messages",
        )
        return Prompts([prompt], text, echo)

    echo = _echo(source, request.n) if source.echo else ""
    if source.shortened:
        room = limits.max_model_len - (request.size.max_tokens or 1)
        found = await shortened(source, read, room)
    else:
        found = await read(source)
    if not found.prompts[0].token_ids:
        raise invalid("messages: the rendered conversation has no tokens", "messages")
    return found


async def _of_conversations(
    source: Conversations, request: GenerationRequest, model: ServedModel, limits: Limits
) -> Prompts:
    """Return the prompts of several conversations, with the text of the first."""
    found: list[Prompts] = []
    for index, each in enumerate(source.conversations):
        try:
            found.append(await _of_conversation(each, request, ToolUse(), model, limits))
        except ApiError as error:
            place = f"messages[{index}]"
            raise error.renamed(partial(re.sub, r"^messages\b", place)) from error
        await asyncio.sleep(0)  # others get their turn: each takes a millisecond
    return Prompts([prompts.prompts[0] for prompts in found], found[0].text)


async def shortened(
    source: Conversation, read: Callable[[Conversation], Awaitable[Prompts]], room: int
) -> Prompts:
    """Return the prompt of as much of a conversation's end as has room; at least its last turn.

    A turn begins with what a user says. What the system says at the beginning stays.

    Args:
        source: the conversation.
        read: makes the prompt of a conversation.
        room: tokens that it may have.

    Raises:
        ApiError: the conversation is wrong, or its last turn is too long by itself.
    """
    messages, begin = source.messages, 0
    while begin < len(messages) and messages[begin].role in ("system", "developer"):
        begin += 1
    later = range(begin + 1, len(messages))
    starts = [begin, *(index for index in later if messages[index].role == "user")]

    async def from_turn(turn: int) -> Prompts:
        kept = [*messages[:begin], *messages[starts[turn] :]]
        return await read(msgspec.structs.replace(source, messages=kept))

    async def fitting(turn: int) -> Prompts | None:
        try:
            found = await from_turn(turn)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return found if len(found.prompts[0].token_ids) <= room else None

    best = await fitting(0)
    first, last = 1, 0 if best is not None else len(starts) - 1
    while first <= last:
        middle = (first + last) // 2
        found = await fitting(middle)
        if found is None:
            first = middle + 1
        else:
            best, last = found, middle - 1
    return best or await from_turn(len(starts) - 1)


def _echo(source: Conversation, copies: int) -> str:
    """Return what an assistant said last, which so many answers repeat; "" if it was another."""
    text = said_last(source.messages)
    if len(text) * copies > MAX_ECHO:
        raise invalid(
            f"echo: {copies} answers that repeat {len(text)} characters are more than {MAX_ECHO}",
            "echo",
        )
    return text


def _of_token_lists(
    token_lists: list[list[int]],
    fields: SamplingFields,
    tokenizer: ServedTokenizer,
    limits: Limits,
) -> list[Prompt]:
    for index, token_ids in enumerate(token_lists):
        check_vocabulary(token_ids, tokenizer.vocab_size, _prompt_name(index, token_lists))
    return [Prompt(_truncated(token_ids, fields, limits), None) for token_ids in token_lists]


def _prompt_name(index: int, items: Sequence[object]) -> str:
    return "prompt" if len(items) == 1 else f"prompt[{index}]"


async def _of_texts(
    source: Texts, fields: SamplingFields, tokenizer: ServedTokenizer, limits: Limits
) -> list[Prompt]:
    """Tokenize texts: short ones together, each long one, or an only one, for itself."""
    texts, special = source.texts, source.add_special_tokens
    short = [text for text in texts if len(text) <= _LONG] if len(texts) > 1 else []
    encoded = iter(
        await tokenizer.encode_many_async(short, add_special_tokens=special) if short else ()
    )
    prompts = []
    for text in texts:
        if len(text) > _LONG or not short:
            prompt = await _text_prompt(
                text, fields, tokenizer, limits, add_special_tokens=special, name="prompt"
            )
        else:
            token_ids = next(encoded)
            kept = _truncated(token_ids, fields, limits)
            prompt = Prompt(kept, text if len(kept) == len(token_ids) else None)
        prompts.append(prompt)
    return prompts


async def _text_prompt(
    text: str,
    fields: SamplingFields,
    tokenizer: ServedTokenizer,
    limits: Limits,
    *,
    add_special_tokens: bool,
    name: str,
) -> Prompt:
    try:
        kept, all_of_it = await encode_prompt(
            tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=limits.max_model_len,
            keep=_tokens_to_keep(fields, limits),
            keep_beginning=_keeps_beginning(fields),
        )
    except TextTooLong as error:
        raise invalid(
            f"{name}: this model's maximum context length is {limits.max_model_len} tokens, but of "
            f"the text {error}",
            name,
            "context_length_exceeded",
        ) from error
    return Prompt(kept, text if all_of_it else None)


def _tokens_to_keep(fields: SamplingFields, limits: Limits) -> int | None:
    """Return how many of a prompt's tokens are wanted; -1 leaves room for one more."""
    keep = fields.truncate_prompt_tokens
    return limits.max_model_len - 1 if keep == -1 else keep


def _truncated(token_ids: list[int], fields: SamplingFields, limits: Limits) -> list[int]:
    keep = _tokens_to_keep(fields, limits)
    if keep is None:
        return token_ids
    return token_ids[:keep] if _keeps_beginning(fields) else token_ids[-keep:]


def _keeps_beginning(fields: SamplingFields) -> bool:
    return fields.truncation_side == "right"
