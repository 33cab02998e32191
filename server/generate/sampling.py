"""How the tokens of a request are drawn: its fields, the model's defaults, the engines' terms."""

import re
import secrets
from typing import TypeVar

from engine.shared.messages import GrammarSpec, SamplingParams
from server.errors import ApiError, invalid, invalid_field
from server.generate.budget import check_named_tokens
from server.generate.request import GenerationRequest
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
    """Return the sampling parameters; the model's defaults stand for fields without a value.

    The grammar applies from the first token.

    Raises:
        ApiError: a field is wrong; `param` names it.
    """
    fields, defaults = request.fields, tokenizer.sampling_defaults
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens", f"{min_tokens} is more than max_tokens, which is {max_tokens}"
        )
    logprobs, prompt_logprobs = request.logprobs, fields.prompt_logprobs
    if logprobs is None and request.best_of > request.n:
        logprobs = 0  # they say which sequences are the best
    elif request.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
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
    """Return the token sequences that spell words, at the beginning of a text and after a space.

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
        # A space that is a token of its own only comes before the word: that is ruled out already.
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
            raise _bad_bias_key(key, tokenizer)
        found[int(key)] = value
    return found


def _bad_bias_key(key: str, tokenizer: ServedTokenizer) -> ApiError:
    return invalid_field(
        "logit_bias", f"{key!r} is not a token id of the vocabulary ({tokenizer.vocab_size} tokens)"
    )
