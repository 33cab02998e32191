"""How the tokens of a request are drawn: its fields, the model's defaults, the engines' terms."""

import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

from engine.shared.messages import SamplingParams
from server.access.budget import check_named_tokens
from server.api.shared.fields import SamplingFields
from server.http.errors import ApiError, invalid
from server.text.tokenizer import ServedTokenizer

T = TypeVar("T")

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def sampling_params(
    request: SamplingFields,
    tokenizer: ServedTokenizer,
    max_tokens: int,
    logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """Return what the engines are told; what a request leaves open is the model's default.

    Raises:
        ApiError: a field is wrong; `param` names it.
    """
    min_tokens, defaults = request.min_tokens or 0, tokenizer.sampling_defaults
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens: {min_tokens} is more than max_tokens, which is {max_tokens}",
            "min_tokens",
        )
    stop_token_ids = tuple(sorted(set(request.stop_token_ids or ())))
    check_vocabulary(stop_token_ids, tokenizer, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=_or(request.temperature, defaults.temperature),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        logit_bias=_logit_bias(request.logit_bias, tokenizer) if request.logit_bias else {},
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        allowed_token_ids=_allowed_token_ids(request.allowed_token_ids, tokenizer),
        bad_words=bad_words,
    )


def check_vocabulary(token_ids: Sequence[int], tokenizer: ServedTokenizer, field: str) -> None:
    """Check that token ids are in the model's vocabulary.

    Raises:
        ApiError: one is not; `field` is what it names.
    """
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        raise invalid(
            f"{field}: token id {max(token_ids)} is outside the vocabulary of "
            f"{tokenizer.vocab_size}",
            field,
        )


async def bad_word_tokens(
    request: SamplingFields, sequences: int, tokenizer: ServedTokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell words, at the beginning of a text and after a space.

    Raises:
        ApiError: a word has no tokens, or together they have too many for so many sequences.
    """
    bare = list(dict.fromkeys([word.lstrip() for word in request.bad_words or ()]))
    if "" in bare:
        index = [word.lstrip() for word in request.bad_words or ()].index("")
        raise invalid(f"bad_words[{index}]: must not be empty", "bad_words")
    if not bare:
        return ()
    encoded = await tokenizer.encode_many_async(
        [*bare, *[" " + word for word in bare]], add_special_tokens=False
    )
    found: dict[tuple[int, ...], None] = {}
    for first, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        found[tuple(first)] = None
        # A space that is a token of its own only comes before the word: that is ruled out already.
        if len(spaced) == len(first) and spaced[:1] != first[:1]:
            found[tuple(spaced)] = None
    check_named_tokens(request, sequences, sum(map(len, found)))
    return tuple(found)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _allowed_token_ids(
    token_ids: list[int] | None, tokenizer: ServedTokenizer
) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    check_vocabulary(token_ids, tokenizer, "allowed_token_ids")
    return tuple(sorted(set(token_ids)))


def _logit_bias(bias: dict[str, float], tokenizer: ServedTokenizer) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= tokenizer.vocab_size:
            raise _bad_bias_key(key, tokenizer)
        found[int(key)] = value
    return found


def _bad_bias_key(key: str, tokenizer: ServedTokenizer) -> ApiError:
    return invalid(
        f"logit_bias: {key!r} is no token id of the vocabulary of {tokenizer.vocab_size}",
        "logit_bias",
    )
