"""Conversion of requests for vLLM's engine core; rejects what vLLM engines do not support."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

import msgspec
from vllm import SamplingParams as VllmSampling
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from engine.shared.grammar_schema import prepared
from engine.shared.messages import (
    AddRequest,
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
    SamplingParams,
)
from engine.shared.pooling import PoolingSpec
from engine.vllm.penalties import ARGUMENT, ResumedPenalties
from engine.vllm.pooling import pooling_params

_SEEDS = 2**63 - 1


class UnsupportedParameter(Exception):
    """A request uses a parameter in a way that vLLM engines do not support."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}")
        self.param = param


class Continuation(Enum):
    """How an engine continues from output tokens that another engine generated."""

    RESUMED = "as after a preemption: vLLM treats the tokens as output"
    COUNTED = "at the end of the prompt, where `PenaltiesProcessor` counts them as output"
    UNCOUNTED = "at the end of the prompt"


def core_request(
    message: AddRequest,
    generation: dict[str, Any],
    eos: int | None,
    continuation: Continuation,
    adapters: Mapping[str, LoRARequest],
    pooling: PoolingSpec | None,
) -> Any:
    """Return the `EngineCoreRequest` of a message.

    With `RESUMED`, the caller must add earlier output tokens by `resume`. Otherwise they are
    appended to the prompt, and token limits are reduced by their number.

    Args:
        generation: the model's generation config, which contains its end-of-sequence tokens.
        eos: the tokenizer's end-of-sequence token.
        adapters: the loaded adapters by version.
        pooling: how the model pools; None if it generates.

    Raises:
        UnsupportedParameter: vLLM engines do not support a parameter.
        ValueError: vLLM rejects a parameter.
    """
    if (message.pooling is None) != (pooling is None):
        raise UnsupportedParameter("model", "the model either generates text or pools")
    if message.adapter and message.adapter not in adapters:
        raise UnsupportedParameter("model", "the adapter is not loaded")
    earlier = [] if continuation is Continuation.RESUMED else message.output_token_ids
    to_pool = None
    if message.pooling is not None and pooling is not None:
        to_pool = pooling_params(message.pooling, pooling)
    return EngineCoreRequest(
        request_id=str(message.id),
        prompt_token_ids=[*message.prompt_token_ids, *earlier],
        mm_features=None,
        sampling_params=None
        if to_pool is not None
        else _sampling_params(message, len(earlier), generation, eos, continuation),
        pooling_params=to_pool,
        arrival_time=time.monotonic(),
        lora_request=adapters[message.adapter] if message.adapter else None,
        cache_salt=message.cache_root.hex() or None,
        data_parallel_rank=None,
        priority=message.priority,
    )


def _sampling_params(
    message: AddRequest,
    done: int,
    generation: dict[str, Any],
    eos: int | None,
    continuation: Continuation,
) -> VllmSampling:
    """Return vLLM's parameters; `done` output tokens are at the end of the prompt."""
    sampling = message.sampling
    params = VllmSampling(
        max_tokens=max(1, sampling.max_tokens - done),
        min_tokens=max(0, sampling.min_tokens - done),
        # Per-sequence generators are slow and, on GPUs, disable vLLM's fast sampling kernels.
        seed=sampling.seed & _SEEDS if sampling.temperature and sampling.seed_given else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        logprob_token_ids=list(sampling.logprob_token_ids) or None,
        prompt_logprobs=None if message.output_token_ids else sampling.prompt_logprobs,
        allowed_token_ids=_listed(sampling.allowed_token_ids),
        structured_outputs=structured(sampling.grammar),
        detokenize=False,
    )
    if sampling.bad_words:
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    if done and (names := _counted(sampling)):
        if continuation is Continuation.UNCOUNTED:
            raise UnsupportedParameter(
                names[0],
                "vLLM's V1 model runner with speculative decoding cannot apply it to a sequence "
                "moved from another engine",
            )
        params.extra_args = {ARGUMENT: asdict(ResumedPenalties.taken_from(params, done))}
    params.update_from_generation_config(generation, eos)
    return params


def resume(request: Any, token_ids: list[int]) -> None:
    """Make a vLLM request look preempted after it generated these tokens."""
    if token_ids:
        request.append_output_token_ids(token_ids)
        # Without a preemption, vLLM expects the first prefill to contain only the prompt.
        request.num_preemptions = 1


def _counted(sampling: SamplingParams) -> list[str]:
    """Return the names of parameters that are set and depend on output tokens only."""
    counted = {
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "bad_words": any(len(word) > 1 for word in sampling.bad_words),
    }
    return [name for name, is_set in counted.items() if is_set]


def structured(grammar: GrammarSpec | None) -> Any:
    """Return vLLM's structured output parameters for a grammar.

    Raises:
        UnsupportedParameter: the grammar has its own whitespace pattern.
    """
    match grammar:
        case None:
            return None
        case JsonSchemaGrammar() | JsonObjectGrammar() if grammar.whitespace is not None:
            raise UnsupportedParameter(
                "whitespace_pattern",
                "vLLM engines use one setting for all requests: disable_any_whitespace of "
                "structured_outputs_config in --engine-args",
            )
        case JsonSchemaGrammar(schema, _, lenient):
            return StructuredOutputsParams(json=_lenient(schema) if lenient else schema)
        case JsonObjectGrammar():
            return StructuredOutputsParams(json_object=True)
        case RegexGrammar(pattern):
            return StructuredOutputsParams(regex=pattern)
        case ChoiceGrammar(choices):
            return StructuredOutputsParams(choice=list(choices))
        case LarkGrammar(text):
            # A directive of llguidance that front ends prepend to grammars converted from GBNF.
            return StructuredOutputsParams(grammar=text.removeprefix("%llguidance {}").lstrip())


def _lenient(schema: str) -> str:
    """Make vLLM's guidance backend ignore the parts of a schema that it cannot enforce."""
    decoded = msgspec.json.decode(schema)
    if not isinstance(decoded, dict):
        return schema
    options = {"lenient": True, "coerce_one_of": True}
    return msgspec.json.encode({**prepared(decoded, lenient=True), "x-guidance": options}).decode()


def _listed(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)
