"""Validation of requests, and of settings under which no request could be computed.

Front ends validate clients' requests. Those that get past them, or come from a front end of another
version, must fail alone, before they share a step with others.
"""

import math
from collections.abc import Iterator

from engine.batch.executor import ExecutorInfo
from engine.models.spec import VisionSpec
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.grammar_spec import MAX_MARKER_SIZE, grammar_size
from engine.shared.matchers import MAX_GRAMMAR_SIZE
from engine.shared.messages import ROOT_SIZE, AddRequest, EncoderInput, SamplingParams

_LARGEST = 2**31 - 1
"""Largest count that fits the executors' arrays."""


def refusal(
    message: AddRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    pools: bool = False,
    in_one_step: bool = False,
) -> str | None:
    """Return why a request can never be served, or None if it can."""
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
    return _bad_root(message) or next(_bad_sampling(sampling), None)


def check_whole_prompts(
    scheduling: SchedulerConfig, cache: CacheConfig, executor: ExecutorInfo, max_model_len: int
) -> None:
    """Reject settings under which the longest prompt and its images do not fit in one step.

    Raises:
        ValueError: naming the setting to change.
    """
    if scheduling.enable_chunked_prefill or executor.in_one_step:
        return
    if scheduling.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"--no-enable-chunked-prefill: --max-num-batched-tokens is "
            f"{scheduling.max_num_batched_tokens}, but a prompt, which is computed in one step, "
            f"may have up to {max_model_len} tokens: raise it, or lower --max-model-len"
        )
    needed = max_model_len * executor.embedding_bytes
    if executor.vision is not None and cache.encoder_cache_bytes < needed:
        raise ValueError(
            f"--no-enable-chunked-prefill: --encoder-cache-bytes is {cache.encoder_cache_bytes}, "
            f"but the images of a prompt, which is computed in one step, may take {needed}: raise "
            "it, lower --max-model-len, or set --language-model-only"
        )


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
        return "output_token_ids must be empty, and dimensions and types_from at least 0"
    return _bad_root(message)


def bad_images(message: AddRequest, vision: VisionSpec | None) -> str | None:
    """Return why a prompt's images are invalid, or None; without `vision` images are refused."""
    if vision is None:
        return "this engine's model has no vision encoder, or one that is not implemented"
    before = 0
    for number, image in enumerate(message.encoder_inputs):
        problem = _bad_image(image, before, message.prompt_token_ids, vision)
        if problem is not None:
            return f"encoder_inputs[{number}]: {problem}"
        before = image.position + image.num_tokens
    return None


def _bad_image(
    image: EncoderInput, before: int, tokens: list[int], vision: VisionSpec
) -> str | None:
    """Return why an image is invalid, or None; the one before it ends at token `before`."""
    size, expected = f"{image.height} x {image.width}", vision.num_tokens(image.height, image.width)
    start, end = image.position, image.position + expected
    others = expected - tokens[max(0, start) : end].count(vision.token_id)
    if expected and vision.breaks_rows:
        others -= vision.grid(image.height, image.width)[0] - 1
    problems = {
        f"the model's encoder takes no image of {size} pixels": not expected,
        f"{size} pixels are {expected} tokens, not {image.num_tokens}": image.num_tokens
        != expected,
        f"{len(image.pixels)} bytes are not those of {size} pixels": (
            len(image.pixels) != 3 * image.height * image.width
        ),
        f"its digest has {len(image.digest)} bytes instead of {ROOT_SIZE}": (
            len(image.digest) != ROOT_SIZE
        ),
        f"it begins at token {start}, before the end of the previous one": start < before,
        f"it ends at token {end}, but the prompt has {len(tokens)}": end > len(tokens),
        f"{others} of its tokens do not stand for an image": others != 0,
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)


def _bad_root(message: AddRequest) -> str | None:
    if len(message.cache_root) not in (0, ROOT_SIZE):
        return f"cache_root has {len(message.cache_root)} bytes: it must be {ROOT_SIZE} or none"
    return None


def _bad_sampling(sampling: SamplingParams) -> Iterator[str]:
    """Yield problems of sampling parameters; NaN fails each comparison."""
    if sampling.allowed_token_ids == ():
        yield "allowed_token_ids is empty: it must allow at least one token"
    if () in sampling.bad_words:
        yield "bad_words: a word without tokens is not allowed"
    if sampling.max_tokens < 1:
        yield f"max_tokens is {sampling.max_tokens}: it must be at least 1"
    counts = {
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs or 0,
        "prompt_logprobs": sampling.prompt_logprobs or 0,
        "grammar_budget": sampling.grammar_budget,
    }
    for name, count in counts.items():
        if not 0 <= count <= _LARGEST:
            yield f"{name} is {count}: it must be from 0 to {_LARGEST}"
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
            yield f"{name} is {value}: it must be finite and {what}"
    for token_id, bias in sampling.logit_bias.items():
        if math.isnan(bias):
            yield f"logit_bias: the bias of token {token_id} is not a number"
    if sampling.grammar is not None and grammar_size(sampling.grammar) > MAX_GRAMMAR_SIZE:
        yield f"the grammar is longer than {MAX_GRAMMAR_SIZE} characters"
    for name in ("grammar_after", "grammar_opening"):
        if len(getattr(sampling, name)) > MAX_MARKER_SIZE:
            yield f"{name} is longer than {MAX_MARKER_SIZE} characters"
