"""Every model family computes the same on a CUDA device as on a CPU."""

from typing import Any

import pytest
import torch

from tests.engine.comparing import relative
from tests.engine.driver import Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.tiny_models import MODELS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PLACES: list[dict[str, Any]] = [{}, {"device": CUDA}]
LENGTHS = {0: 60, 1: 7, 2: 100}


def all_logits(engine: Driver, prompt: MakePrompt) -> torch.Tensor:
    """Compute prompts of three lengths, one of them in chunks, and some decodes."""
    for slot, length in LENGTHS.items():
        engine.start(slot, prompt(length + 4))
    parts = [engine.logits({0: 60, 1: 7, 2: 41}), engine.logits({0: 1, 2: 59})]
    parts += [engine.logits({0: 1, 1: 1, 2: 1}) for _ in range(3)]
    return torch.cat(parts).float().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_a_cpu(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    directory = checkpoint(name).directory
    here = all_logits(driver(directory, dtype="float32"), prompt)
    there = all_logits(driver(directory, dtype="float32", device=CUDA), prompt)
    assert relative(there, here) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "fused"), [("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_16_bits_are_as_close_as_on_a_cpu(
    name: str,
    dtype: str,
    fused: bool,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    """Nearly tied experts can differ, so compare the median token."""
    directory = checkpoint(name).directory
    exact = all_logits(driver(directory, dtype="float32"), prompt)

    def error(**options: Any) -> float:
        logits = all_logits(driver(directory, **options), prompt)
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    there = error(dtype=dtype, device=CUDA, fused=fused)
    assert there < 1.5 * error(dtype="bfloat16") + 0.002


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "gpt-oss", "deepseek3"])
def test_8_bit_cache_equals_that_of_a_cpu(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    directory = checkpoint(name).directory
    here, there = (
        all_logits(driver(directory, dtype="float32", kv_cache_dtype="fp8", **options), prompt)
        for options in PLACES
    )
    assert relative(there, here) < 0.05  # what is rounded the other way, by a hair, adds up
