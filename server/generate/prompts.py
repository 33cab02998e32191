"""Conversion of a request's prompts to token IDs."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from server.answer.tool_choice import ToolUse
from server.errors import ApiError, element, invalid, invalid_field
from server.generate.conversation import rendered
from server.generate.model import ServedModel
from server.generate.request import Conversation, GenerationRequest, Prompt
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import ServedTokenizer, check_vocabulary

_LONG = 1 << 16
"""Characters from which on a prompt is tokenized separately, not in a batch."""


Read = tuple[Prompt, str]
"""A prompt, and the rendered conversation it was made from."""


async def prompts_of(
    request: GenerationRequest, tools: ToolUse, model: ServedModel
) -> tuple[list[Prompt], str]:
    """Return a request's prompts, and the rendered text of the first conversation.

    `tools` are those that the template shows.

    Raises:
        ApiError: a prompt is invalid or too long, or a conversation has too many tokens.
    """
    if request.is_batch:
        found: list[Read] = []
        for index, each in enumerate(request.conversations):
            try:
                found.append(await _of_conversation(each, request, ToolUse(), model))
            except ApiError as error:
                field = f"messages[{index}]"
                raise error.renamed(partial(re.sub, r"^messages\b", field)) from error
            await asyncio.sleep(0)  # each takes about 1 ms: yield to other requests
        return [prompt for prompt, _ in found], found[0][1]
    if request.conversation is not None:
        prompt, text = await _of_conversation(request.conversation, request, tools, model)
        return [prompt], text
    if request.texts:
        prompts = await _of_texts(request, model.tokenizer)
    else:
        prompts = _of_token_lists(request, model.tokenizer)
    for index, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise invalid(f"{element('prompt', index, prompts)}: must not be empty", "prompt")
    return prompts, ""


async def _of_conversation(
    source: Conversation, request: GenerationRequest, tools: ToolUse, model: ServedModel
) -> Read:
    async def read(conversation: Conversation) -> Read:
        text = await rendered(conversation, tools, model)
        special = source.add_special_tokens
        prompt = await _text_prompt(
            text, request, model.tokenizer, add_special_tokens=special, name="messages"
        )
        if model.images is not None and (images := conversation.shown_images):
            inputs = model.images.placed(prompt.token_ids, images)
            prompt = msgspec.structs.replace(prompt, encoder_inputs=inputs)
        if (placeholders := model.tokenizer.placeholders) is not None:
            text = placeholders.show(text)
        return prompt, text

    if source.shortened:
        room = request.max_model_len - (request.max_tokens or 1)
        found = await shortened(source, read, room)
    else:
        found = await read(source)
    if not found[0].token_ids:
        raise invalid_field("messages", "the rendered conversation has no tokens")
    return found


async def shortened(
    source: Conversation, read: Callable[[Conversation], Awaitable[Read]], room: int
) -> Read:
    """Return the prompt of the newest turns that fit, at least the last one.

    A turn starts with a user message. System messages at the beginning are kept.

    Args:
        read: makes the prompt of a conversation.
        room: maximum tokens of the prompt.

    Raises:
        ApiError: the conversation is invalid, or its last turn alone is too long.
    """
    messages, begin = source.messages, 0
    while begin < len(messages) and messages[begin].role in ("system", "developer"):
        begin += 1
    later = range(begin + 1, len(messages))
    starts = [begin, *(index for index in later if messages[index].role == "user")]

    async def from_turn(turn: int) -> Read:
        kept = [*messages[:begin], *messages[starts[turn] :]]
        return await read(msgspec.structs.replace(source, messages=kept))

    async def fitting(turn: int) -> Read | None:
        try:
            found = await from_turn(turn)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return found if len(found[0].token_ids) <= room else None

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


def _of_token_lists(request: GenerationRequest, tokenizer: ServedTokenizer) -> list[Prompt]:
    lists, reserved = request.token_lists, tokenizer.placeholder_ids
    for index, token_ids in enumerate(lists):
        name = element("prompt", index, lists)
        check_vocabulary(token_ids, tokenizer.vocab_size, name)
        if reserved and not reserved.isdisjoint(token_ids):
            raise invalid_field(name, "has tokens that stand for images")
    return [Prompt(_truncated(token_ids, request), None) for token_ids in lists]


async def _of_texts(request: GenerationRequest, tokenizer: ServedTokenizer) -> list[Prompt]:
    """Tokenize texts: short ones in batches, a long or single one separately."""
    texts, special = request.texts, request.add_special_tokens
    if tokenizer.placeholders is not None:
        texts = tokenizer.placeholders.hide(texts)
    short = [text for text in texts if len(text) <= _LONG] if len(texts) > 1 else []
    encoded = iter(
        await tokenizer.encode_many_async(short, add_special_tokens=special) if short else ()
    )
    prompts = []
    for text in texts:
        if len(text) > _LONG or not short:
            prompt = await _text_prompt(
                text, request, tokenizer, add_special_tokens=special, name="prompt"
            )
        else:
            token_ids = next(encoded)
            kept = _truncated(token_ids, request)
            prompt = Prompt(kept, text if len(kept) == len(token_ids) else None)
        prompts.append(prompt)
    if tokenizer.placeholders is not None:
        prompts = [
            prompt if prompt.text is None else msgspec.structs.replace(prompt, text=text)
            for prompt, text in zip(prompts, request.texts, strict=True)
        ]
    return prompts


async def _text_prompt(
    text: str,
    request: GenerationRequest,
    tokenizer: ServedTokenizer,
    *,
    add_special_tokens: bool,
    name: str,
) -> Prompt:
    keep, from_beginning = _truncation(request)
    try:
        kept, is_whole = await encode_prompt(
            tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            longest=request.max_model_len,
            keep=keep,
            keep_beginning=from_beginning,
        )
    except TextTooLong as error:
        raise invalid_field(
            name,
            f"this model's maximum context length is {request.max_model_len} tokens, but "
            f"the text has more: {error}",
            "context_length_exceeded",
        ) from error
    return Prompt(kept, text if is_whole else None)


def _truncated(token_ids: list[int], request: GenerationRequest) -> list[int]:
    keep, from_beginning = _truncation(request)
    if keep is None:
        return token_ids
    return token_ids[:keep] if from_beginning else token_ids[-keep:]


def _truncation(request: GenerationRequest) -> tuple[int | None, bool]:
    """Return how many tokens of a prompt to keep (None: all), and whether to keep the first."""
    keep = request.fields.truncate_prompt_tokens
    if keep == -1:
        keep = request.max_model_len - 1  # leaves room for one generated token
    return keep, request.fields.truncation_side == "right"
