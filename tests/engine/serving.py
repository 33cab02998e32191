"""Runs requests to completion on one engine with a real model, in the test process."""

from pathlib import Path
from threading import Event
from typing import Any, Literal, NamedTuple

import pytest

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.executor.in_process import InProcessExecutor
from engine.kv.tier_opening import open_tiers
from engine.kv.transfer_settings import read_transfer
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import (
    AddRequest,
    EngineStats,
    FinishReason,
    SamplingParams,
    TokenLogprob,
)
from tests.support.waiting import PATIENCE

SOME_TEXT = [(5 * i) % 37 + 60 for i in range(40)]

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "cold": {"temperature": 0.3},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.1},
    "penalized by count": {"temperature": 0.0, "frequency_penalty": 0.15},
    "penalized once": {"temperature": 0.4, "presence_penalty": 0.4},
    "biased": {"temperature": 0.0, "logit_bias": {70: 4.0, 71: -100.0}},
    "long": {"temperature": 0.0, "min_tokens": 20, "ignore_eos": False},
    "stopped": {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": (15, 200)},
    "allowed": {"allowed_token_ids": tuple(range(60, 75)), "temperature": 0.5},
    "without words": {"temperature": 0.0, "bad_words": ((201,), (14, 201), (62, 67, 72))},
    "scored": {"temperature": 0.3, "logprobs": 3},
    "scored prompt": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
}
"""Request parameters that affect sampling."""


class Answer(NamedTuple):
    tokens: list[int]
    reason: FinishReason | None
    logprobs: list[TokenLogprob]


def serve(
    directory: Path,
    requests: list[AddRequest],
    *,
    dtype: Literal["bfloat16", "float16", "float32"],
    num_blocks: int = 200,
    block_size: int = 8,
    device: Literal["cpu", "cuda"] = "cpu",
    enforce_eager: bool = False,
    batch_invariant: bool = False,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    enable_prefix_caching: bool = True,
    tiers: dict[str, Any] | None = None,
    **scheduling: Any,
) -> tuple[list[Answer], EngineStats]:
    """Run all requests in one engine, which computes 48 tokens per step.

    Where it drafts, it does so whether it pays or not, unless a price is given. `tiers` are the
    cache's settings of those.

    Returns:
        The answers in the order of the requests, and the engine's last stats.
    """
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype, max_model_len=256, device=device),
        cache=CacheConfig(
            num_kv_blocks=num_blocks,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching,
            **(tiers or {}),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=48,
            **{"speculative_row_price": 0.0} | scheduling,
        ),
        executor=ExecutorConfig(
            threads=1, enforce_eager=enforce_eager, batch_invariant=batch_invariant
        ),
    )
    executor = InProcessExecutor(config)
    transfer = read_transfer(config.cache, 0)
    connectors = transfer.connectors if transfer else ()
    opened = open_tiers(config, executor, executor.info.model_fingerprint, connectors=connectors)
    settled = Event()
    if opened is not None:
        opened.on_settled = settled.set
    core = EngineCore(config, executor, rank=0, incarnation=1, tiers=opened)
    core.front_end_joined(0, 1)
    for request in requests:
        core.handle(request)
    answers = {request.id: Answer([], None, []) for request in requests}
    while core.has_requests:
        if settled.is_set() or not core.has_work:
            assert settled.wait(PATIENCE)
            settled.clear()
            core.handle(PrerequisitesSettled())
            continue
        for output in core.step().outputs.get(0, []):
            known = answers[output.id]
            known.tokens.extend(output.token_ids)
            known.logprobs.extend(output.logprobs or [])
            answers[output.id] = known._replace(reason=output.finish_reason)
    if opened is not None:
        opened.shutdown()
    stats = core.stats()
    executor.shutdown()
    return [answers[request.id] for request in requests], stats


def request(id: int, prompt: list[int], **sampling: Any) -> AddRequest:
    params = {"max_tokens": 60, "seed": id, "ignore_eos": True} | sampling
    return AddRequest(id, str(id), 0, 0, prompt, SamplingParams(**params))


def every_kind() -> list[AddRequest]:
    """Return a request with each kind of parameters; prompts are of up to 111 tokens."""
    return [
        request(id, SOME_TEXT[: 11 + 2 * id] * (1 + id % 3), max_tokens=28, **sampling)
        for id, sampling in enumerate(PARAMETERS.values())
    ]


def assert_alike(answers: list[Answer], others: list[Answer]) -> None:
    """Compare answers to `every_kind`: tokens and ends are the same, scores but for rounding."""
    for name, one, other in zip(PARAMETERS, answers, others, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason), name
        scores = [[each.logprob for each in answer.logprobs] for answer in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4), name
