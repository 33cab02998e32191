"""A whole engine on a CUDA device gives the tokens that it gives on a CPU."""

from typing import Any

import pytest
import torch

from engine.executor.in_process import InProcessExecutor
from engine.models.attention.varlen import CudaAttention, VarlenAttention
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from tests.engine.fixtures import SaveModel
from tests.engine.serving import request, serve

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REQUESTS = [
    request(id, [(7 * id + 3 * i) % 250 for i in range(3 + 20 * id)], temperature=0.0)
    for id in range(5)
]
SCHEDULING = [{}, {"async_scheduling": True}, {"speculative_ngram": 4}]


@pytest.mark.parametrize("scheduling", SCHEDULING, ids=["apart", "overlapped", "drafted"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "qwen3-moe"])
def test_tokens_are_those_of_a_cpu(
    name: str, scheduling: dict[str, Any], checkpoint: SaveModel
) -> None:
    directory = checkpoint(name).directory
    there, _ = serve(directory, REQUESTS, dtype="float32", device="cuda", **scheduling)
    here, _ = serve(directory, REQUESTS, dtype="float32", **scheduling)
    assert [answer.tokens for answer in there] == [answer.tokens for answer in here]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_bundled_model_agrees_in_16_bits(block_size: int, eager: bool) -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": block_size,
        "enforce_eager": eager,
    }
    there, _ = serve(BUNDLED_MODEL, REQUESTS, device="cuda", **options)
    here, _ = serve(BUNDLED_MODEL, REQUESTS, **options)
    agreeing = [
        sum(a == b for a, b in zip(one.tokens[:8], other.tokens[:8], strict=True))
        for one, other in zip(there, here, strict=True)
    ]
    assert sum(agreeing) >= 0.8 * 8 * len(REQUESTS)


def test_recorded_steps_compute_what_launched_ones_do(checkpoint: SaveModel) -> None:
    directory = checkpoint("llama").directory
    answers = [
        serve(
            directory, REQUESTS, dtype="bfloat16", device="cuda", block_size=256,
            enforce_eager=eager,
        )[0]
        for eager in (True, False)
    ]  # fmt: skip
    assert [each.tokens for each in answers[0]] == [each.tokens for each in answers[1]]


def test_the_cache_is_sized_by_a_trial_step(checkpoint: SaveModel) -> None:
    def blocks(utilization: float) -> int:
        executor = InProcessExecutor(
            EngineConfig(
                model=ModelConfig(model=str(checkpoint("llama").directory), device="cuda"),
                cache=CacheConfig(gpu_memory_utilization=utilization, block_size=256),
                scheduler=SchedulerConfig(max_num_seqs=4096),
                executor=ExecutorConfig(threads=1),
            )
        )
        found = executor.info.num_kv_blocks
        executor.shutdown()
        return found

    assert 0 < blocks(0.3) <= blocks(0.6)


def test_the_kernel_is_used_for_large_blocks(checkpoint: SaveModel) -> None:
    executor = InProcessExecutor(
        EngineConfig(
            model=ModelConfig(
                model=str(checkpoint("llama").directory), device="cuda", dtype="bfloat16"
            ),
            cache=CacheConfig(num_kv_blocks=8, block_size=256),
        )
    )
    assert executor._model is not None
    attention = executor._model.attention
    assert isinstance(attention, CudaAttention)
    if not isinstance(attention.for_blocks(256), VarlenAttention):
        pytest.skip("this torch build has no paged attention kernel for this device")
    executor.shutdown()
