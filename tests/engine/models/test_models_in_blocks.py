"""Models with 16-bit weights in blocks of outputs match any other weight layout."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.products import dense
from engine.models.products.blocked import BlockedLinear
from engine.shared.config import BUNDLED_MODEL
from tests.engine.comparing import relative
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.lora.adapters import train
from tests.engine.lora.test_adapted_models import load

pytestmark = pytest.mark.usefixtures("avx2_alone")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that tests have laid out in blocks."""
    weights: list[torch.Tensor] = []

    class Counted(BlockedLinear):
        def __init__(self, weight: torch.Tensor, bias: Any, **options: Any) -> None:
            weights.append(weight)
            super().__init__(weight, bias, **options)

    monkeypatch.setattr(dense, "BlockedLinear", Counted)
    return weights


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-biased", "bfloat16"),
        ("llama-tied-llama3", "float16"),
        ("qwen3", "bfloat16"),
        ("gemma3", "bfloat16"),
        ("phi3-partial", "float16"),
        ("qwen3-moe-many", "float16"),
        ("gpt-oss", "bfloat16"),
        ("deepseek3", "bfloat16"),
    ],
)
def test_blocked_models_are_close_to_reference(
    name: str,
    dtype: str,
    blocks: list[torch.Tensor],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model = checkpoint(name)
    engine = driver(model.directory, dtype=dtype)
    assert len(blocks) > 3
    engine.start(0, prompt(40))
    parts = [engine.logits({0: count}) for count in (30, 1, 9)]  # many rows, one, some
    # Of most tokens: where two experts score alike, one takes the other.
    pairs = zip(torch.cat(parts), model.logits(prompt(40)), strict=True)
    assert statistics.median(relative(ours, theirs) for ours, theirs in pairs) < 0.05


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-llama3"])
def test_tied_embeddings_are_stored_once(
    name: str, blocks: list[torch.Tensor], checkpoint: SaveModel, driver: LoadDriver
) -> None:
    engine = driver(checkpoint(name).directory, dtype="bfloat16")
    embed = engine.runner.model.embed_tokens
    assert isinstance(getattr(embed, "__self__", None), BlockedLinear)
    table = embed(torch.arange(256))
    assert sum(torch.equal(weight, table) for weight in blocks) == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bundled", {}),
        ("bundled", {"kv_cache_dtype": "fp8"}),
        ("llama-biased", {}),
        ("qwen3-moe-many", {}),
        ("deepseek3", {}),
    ],
)
def test_blocked_models_can_be_batch_invariant(
    name: str,
    settings: dict[str, str],
    blocks: list[torch.Tensor],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    directory = BUNDLED_MODEL if name == "bundled" else checkpoint(name).directory
    engine = driver(directory, dtype="bfloat16", batch_invariant=True, **settings)
    assert len(blocks) > 3
    tokens = prompt(100)
    engine.start(0, tokens)
    alone = torch.cat([engine.logits({0: 1}) for _ in tokens])
    engine.start(1, tokens)
    engine.start(2, tokens)
    engine.start(3, prompt(30))
    engine.prefill(3)
    assert torch.equal(engine.logits({1: 100}), alone), "in one step"
    parts = [engine.logits({2: count, 3: 1})[:count] for count in (5, 70, 1, 24)]
    assert torch.equal(torch.cat(parts), alone), "in chunks, beside another"


def test_adapters_equal_merged_weights(
    blocks: list[torch.Tensor],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    base = checkpoint("llama")
    adapter = train(base, tmp_path / "adapter", 7, r=8)
    engine = load(driver, base.directory, adapter.directory, dtype="bfloat16")
    assert len(blocks) > 3
    engine.start(0, prompt(30), adapter=0)
    engine.start(1, prompt(31))
    logits = engine.logits({0: 30, 1: 31})
    merged = adapter.merged.logits(prompt(30))
    assert relative(merged, base.logits(prompt(30))) > 0.3, "the adapter changes little"
    assert relative(logits[:30], merged) < 0.03
    assert relative(logits[30:], base.logits(prompt(31))) < 0.03
