"""Models with an 8-bit KV cache (--kv-cache-dtype fp8): accuracy, and step independence.

Results do not depend on the division into steps.
"""

from typing import Any

import pytest
import torch

from engine.executor.in_process import InProcessExecutor
from engine.process.early_stop import EarlyStop
from engine.process.main import CannotStart, build_executor
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
)
from engine.shared.lifeline import Lifeline
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.serving import Answer, request, serve


def relative(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return each row's relative distance from its reference."""
    distances: torch.Tensor = (values - reference).norm(dim=1) / reference.norm(dim=1)
    return distances


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral-window",
        "qwen2-some-windows",
        "gemma2",  # capped scores
        "gpt-oss",  # sinks
        "deepseek3",  # a latent
        "llama4",  # in chunks
    ],
)
def test_every_kind_of_attention_is_close(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    directory, tokens = checkpoint(name).directory, prompt(60)
    exact, rounded = (driver(directory, kv_cache_dtype=kept) for kept in ("auto", "fp8"))
    for engine in (exact, rounded):
        engine.start(0, tokens)
    errors = relative(rounded.logits({0: 60}), exact.logits({0: 60}))
    assert 0 < errors.median() < 0.2  # random weights tell keys apart that are nearly equal


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_work_with_fp8_cache(
    quantization: str, driver: LoadDriver, prompt: MakePrompt
) -> None:
    options = {"dtype": "bfloat16", "quantization": quantization}
    exact, rounded = (
        driver(BUNDLED_MODEL, kv_cache_dtype=kept, **options) for kept in ("auto", "fp8")
    )
    for engine in (exact, rounded):
        engine.start(0, prompt(60))
    errors = relative(rounded.logits({0: 60}).float(), exact.logits({0: 60}).float())
    assert 0 < errors.median() < 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek3"])
def test_cached_prefix_gives_same_bits_as_computed_one(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    engine = driver(checkpoint(name).directory, kv_cache_dtype="fp8")
    tokens = prompt(70)
    engine.start(0, tokens)
    engine.step({0: 40})
    computed = engine.logits({0: 30})
    engine.start(1, tokens, cached_blocks=engine.blocks[0][:5])
    assert torch.equal(engine.logits({1: 30}), computed)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "deepseek3"])
def test_tokens_see_own_chunk_with_cache_precision(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    """Were a chunk's own keys and values attended to before they are rounded, decodes would differ
    by as much as the rounding does; they differ as two orders of adding up do."""
    directory, tokens = checkpoint(name).directory, prompt(50)
    exact, whole, parts = (
        driver(directory, kv_cache_dtype=kept) for kept in ("auto", "fp8", "fp8")
    )
    for engine in (exact, whole, parts):
        engine.start(0, tokens)
    at_once = whole.logits({0: 50})
    one_by_one = torch.cat([parts.logits({0: 1}) for _ in range(50)])
    rounding = relative(at_once, exact.logits({0: 50})).median()
    assert relative(one_by_one, at_once).median() < rounding / 10


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 33},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"speculative_ngram": 4},
        {"long_prefill_token_threshold": 7},
        {"speculative_model": "itself"},
    ],
    ids=["few blocks", "nothing cached", "overlapped", "n-grams", "chunks", "draft model"],
)
def test_scheduling_does_not_change_answers(
    options: dict[str, Any], checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    directory, counted = checkpoint("llama").directory, {}
    if "speculative_model" in options:
        options = {"speculative_model": str(directory)}

    def answers(**changed: Any) -> list[Answer]:
        prompts = [prompt(60), prompt(9) * 3, prompt(60)[:40] + prompt(3), prompt(50)]
        requests = [request(id, each, temperature=0.0) for id, each in enumerate(prompts)]
        found, stats = serve(
            directory,
            requests,
            dtype="float32",
            batch_invariant=True,
            kv_cache_dtype="fp8",
            **changed,
        )
        counted["preemptions"] = stats.counters.preemptions
        counted["drafts"] = stats.counters.spec_draft_tokens
        return found

    expected = answers()
    assert counted["preemptions"] == 0
    assert answers(**options) == expected
    assert (counted["preemptions"] > 0) == ("num_blocks" in options)
    assert (counted["drafts"] > 0) == any(name.startswith("speculative") for name in options)


def test_the_same_memory_has_nearly_twice_the_blocks() -> None:
    blocks = {}
    for kept in ("auto", "fp8"):
        executor = InProcessExecutor(
            EngineConfig(
                model=ModelConfig(model=str(BUNDLED_MODEL), device="cpu", dtype="bfloat16"),
                cache=CacheConfig(kv_cache_memory_bytes=4 << 20, kv_cache_dtype=kept),
            )
        )
        blocks[kept] = executor.info.num_kv_blocks
        executor.shutdown()
    assert blocks["fp8"] > 1.85 * blocks["auto"]  # heads of 32: 34 bytes in place of 64


def test_fp8_cache_is_refused_for_executors_without_kv() -> None:
    config = EngineConfig(
        cache=CacheConfig(kv_cache_dtype="fp8"), executor=ExecutorConfig(executor="simulated")
    )
    with pytest.raises(CannotStart, match="--kv-cache-dtype fp8 needs --executor model"):
        build_executor(config, 0, Lifeline(None), EarlyStop())
