"""Models in 8 or 4 bits: distance from the originals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.shared.config import BUNDLED_MODEL
from tests.engine.comparing import relative
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.test_bundled_model import PASSAGE


@pytest.mark.parametrize(
    ("dtype", "options", "error", "worse", "agreeing"),
    [
        ("bfloat16", {"quantization": "int8"}, 0.015, 0.005, 0.97),
        ("bfloat16", {"quantization": "int4"}, 0.12, 0.03, 0.85),
        ("bfloat16", {"kv_cache_dtype": "fp8"}, 0.04, 0.02, 0.9),
        ("float16", {"kv_cache_dtype": "fp8"}, 0.04, 0.02, 0.9),
        ("float32", {"kv_cache_dtype": "fp8"}, 0.04, 0.02, 0.9),
    ],
    ids=str,
)
def test_bundled_model_keeps_its_logits_and_its_perplexity(
    driver: LoadDriver,
    dtype: str,
    options: dict[str, Any],
    error: float,
    worse: float,
    agreeing: float,
) -> None:
    tokenizer = Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json"))
    tokens = tokenizer.encode(PASSAGE).ids

    def found(**options: Any) -> tuple[torch.Tensor, float]:
        """Return the logits and the perplexity of the passage."""
        engine = driver(BUNDLED_MODEL, dtype=dtype, **options)
        engine.start(0, tokens)
        logits = engine.logits({0: len(tokens)}).float()
        logprobs = torch.log_softmax(logits[:-1], dim=-1)
        of_text = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
        return logits, math.exp(-of_text.mean())

    (exact, right), (rounded, perplexity) = found(), found(**options)
    assert relative(rounded, exact) < error
    assert perplexity == pytest.approx(right, rel=worse)
    assert (rounded.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean() > agreeing


@pytest.mark.parametrize(
    "name",
    ["llama-biased", "qwen3", "mixtral", "qwen3-moe-many", "gemma3", "glm4", "gpt-oss-mxfp4"],
)
def test_every_kind_of_layer_is_close_in_8_bits(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    directory = checkpoint(name).directory
    exact, quantized = driver(directory), driver(directory, quantization="int8")
    tokens = prompt(60)
    exact.start(0, tokens)
    quantized.start(0, tokens)
    expected = exact.logits({0: 60})
    errors = (quantized.logits({0: 60}) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.1  # a router can choose a different expert for a few tokens


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tokens_do_not_depend_on_the_batch(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, kind: str
) -> None:
    directory = checkpoint("llama").directory
    alone, together = (
        driver(directory, quantization=kind, dtype="bfloat16", batch_invariant=kind == "int4")
        for _ in range(2)
    )
    alone.start(0, prompt(30))
    alone.prefill(0)
    alone.decode(20, 0)
    for slot in range(5):
        together.start(slot, prompt(30 + slot))
        together.prefill(slot)
    together.decode(20, *range(5))
    assert together.tokens[0] == alone.tokens[0]
