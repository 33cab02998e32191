"""Why a request is refused.

Front ends check what clients ask for. What gets past them, or comes from a front end of
another version, must fail alone: here, before it shares a step with others.
"""

import math

from engine.shared.grammar_spec import MAX_GRAMMAR_SIZE, MAX_MARKER_SIZE, grammar_size
from engine.shared.messages import ROOT_SIZE, AddRequest, SamplingParams

_LARGEST = 2**31 - 1
"""Largest count that executors keep in their arrays."""


def refusal(
    message: AddRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    pools: bool = False,
    in_one_step: bool = False,
) -> str | None:
    """Return why a request can never be served, or None when it can."""
    num_prompt_tokens = len(message.prompt_token_ids)
    if num_prompt_tokens == 0:
        return "the prompt is empty: it needs at least one token"
    if pools or message.pooling is not None:
        return _bad_pooling(message, max_model_len, vocab_size, pools, in_one_step=in_one_step)
    if num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens, but this engine takes at most "
            f"{max_model_len - 1} so that one token can be generated"
        )
    sampling = message.sampling
    named_ids = {
        "prompt": message.prompt_token_ids,
        "output so far": message.output_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": [token_id for word in sampling.bad_words for token_id in word],
    }
    for where, ids in named_ids.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"{where}: token ids must be from 0 to {vocab_size - 1}"
    return _bad_root(message) or _bad_words(sampling) or _bad_sampling(sampling)


def _bad_pooling(
    message: AddRequest, max_model_len: int, vocab_size: int, pools: bool, *, in_one_step: bool
) -> str | None:
    token_ids, pooling = message.prompt_token_ids, message.pooling
    if pooling is None or not pools:
        return "this engine's model " + ("generates nothing" if pools else "makes no vectors")
    if pooling.per_token and not in_one_step:
        return "this engine computes prompts in parts: tokens have no vectors"
    if len(token_ids) > max_model_len:
        return f"the input has {len(token_ids)} tokens, but this engine takes {max_model_len}"
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return f"input: token ids must be from 0 to {vocab_size - 1}"
    if message.output_token_ids or pooling.dimensions < 0 or pooling.types_from < 0:
        return "there is output so far, or dimensions or types_from are below 0"
    return _bad_root(message)


def _bad_root(message: AddRequest) -> str | None:
    if len(message.cache_root) not in (0, ROOT_SIZE):
        return f"cache_root has {len(message.cache_root)} bytes: it must be {ROOT_SIZE} or none"
    return None


def _bad_words(sampling: SamplingParams) -> str | None:
    if sampling.allowed_token_ids == ():
        return "allowed_token_ids is empty: no token could be drawn"
    if () in sampling.bad_words:
        return "bad_words: a word without tokens rules out nothing"
    return None


def _bad_sampling(sampling: SamplingParams) -> str | None:
    """Return what is wrong with sampling parameters; NaN fails each comparison."""
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: it must be at least 1"
    counts = {
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs or 0,
        "prompt_logprobs": sampling.prompt_logprobs or 0,
    }
    for name, count in counts.items():
        if not 0 <= count <= _LARGEST:
            return f"{name} is {count}: it must be from 0 to {_LARGEST}"
    limits = {
        "temperature": (sampling.temperature, sampling.temperature >= 0, "0 or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        "repetition_penalty": (
            sampling.repetition_penalty, sampling.repetition_penalty > 0, "above 0"
        ),
        "presence_penalty": (sampling.presence_penalty, True, "a number"),
        "frequency_penalty": (sampling.frequency_penalty, True, "a number"),
    }  # fmt: skip
    for name, (value, within, what) in limits.items():
        if not (within and math.isfinite(value)):
            return f"{name} is {value}: it must be finite and {what}"
    for token_id, bias in sampling.logit_bias.items():
        if math.isnan(bias):
            return f"logit_bias: the bias of token {token_id} is not a number"
    return _bad_grammar(sampling)


def _bad_grammar(sampling: SamplingParams) -> str | None:
    if sampling.grammar is not None and grammar_size(sampling.grammar) > MAX_GRAMMAR_SIZE:
        return f"the grammar is longer than {MAX_GRAMMAR_SIZE} characters"
    for name in ("grammar_after", "grammar_opening"):
        if len(getattr(sampling, name)) > MAX_MARKER_SIZE:
            return f"{name} is longer than {MAX_MARKER_SIZE} characters"
    if not 0 <= sampling.grammar_budget <= _LARGEST:
        return f"grammar_budget is {sampling.grammar_budget}: it must be from 0 to {_LARGEST}"
    return None
