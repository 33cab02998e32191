"""The prompts of a request as token ids."""

from collections.abc import Sequence
from typing import Any

from server.api.completions.schema import CompletionRequest
from server.api.shared.fields import SamplingFields
from server.generate.checks import Limits
from server.generate.fold import Prompt
from server.generate.sampling import check_vocabulary
from server.http.errors import invalid
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import ServedTokenizer

_LONG = 1 << 16
"""Characters of a prompt that is tokenized by itself, not with others."""


async def completion_prompts(
    request: CompletionRequest, tokenizer: ServedTokenizer, limits: Limits
) -> list[Prompt]:
    add_special_tokens = request.add_special_tokens is not False
    source = request.prompt
    items: list[Any] = [source]
    if not isinstance(source, str) and not isinstance(source[0], int):
        items = list(source)
    if len(items) > 1 and isinstance(items[0], str):
        prompts = await _text_prompts(
            items, request, tokenizer, limits, add_special_tokens=add_special_tokens
        )
    elif isinstance(items[0], str):
        only = await text_prompt(
            items[0],
            request,
            tokenizer,
            limits,
            add_special_tokens=add_special_tokens,
            name="prompt",
        )
        prompts = [only]
    else:
        for index, item in enumerate(items):
            check_vocabulary(item, tokenizer, _prompt_name(index, items))
        prompts = [Prompt(_truncated(item, request, limits), None) for item in items]
    for index, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise invalid(f"{_prompt_name(index, items)}: must not be empty", "prompt")
    return prompts


def _prompt_name(index: int, items: Sequence[Any]) -> str:
    return "prompt" if len(items) == 1 else f"prompt[{index}]"


async def _text_prompts(
    texts: list[str],
    request: SamplingFields,
    tokenizer: ServedTokenizer,
    limits: Limits,
    *,
    add_special_tokens: bool,
) -> list[Prompt]:
    """Tokenize several texts: short ones together, each long one for itself."""
    short = [text for text in texts if len(text) <= _LONG]
    batch = await tokenizer.encode_many_async(short, add_special_tokens=add_special_tokens)
    encoded = iter(batch)
    prompts = []
    for text in texts:
        if len(text) > _LONG:
            prompt = await text_prompt(
                text,
                request,
                tokenizer,
                limits,
                add_special_tokens=add_special_tokens,
                name="prompt",
            )
        else:
            token_ids = next(encoded)
            kept = _truncated(token_ids, request, limits)
            prompt = Prompt(kept, text if len(kept) == len(token_ids) else None)
        prompts.append(prompt)
    return prompts


async def text_prompt(
    text: str,
    request: SamplingFields,
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
            keep=_tokens_to_keep(request, limits),
            keep_beginning=_keeps_beginning(request),
        )
    except TextTooLong as error:
        raise invalid(
            f"{name}: this model's maximum context length is {limits.max_model_len} tokens, but of "
            f"the text {error}",
            name,
            "context_length_exceeded",
        ) from error
    return Prompt(kept, text if all_of_it else None)


def _tokens_to_keep(request: SamplingFields, limits: Limits) -> int | None:
    """Return how many of a prompt's tokens are wanted; -1 leaves room for one more."""
    keep = request.truncate_prompt_tokens
    return limits.max_model_len - 1 if keep == -1 else keep


def _truncated(token_ids: list[int], request: SamplingFields, limits: Limits) -> list[int]:
    keep = _tokens_to_keep(request, limits)
    if keep is None:
        return token_ids
    return token_ids[:keep] if _keeps_beginning(request) else token_ids[-keep:]


def _keeps_beginning(request: SamplingFields) -> bool:
    return request.truncation_side == "right"
