"""Sampling from logits agrees with sampling from probabilities, for any batch."""

import numpy as np
import pytest
import torch

from engine.runner.categorical import DrawFromLogits, draw_from_logits, draw_from_weights
from engine.runner.compiled_draws import drawing_for
from engine.runner.slots import FloatArray


@pytest.fixture(params=["torch", "kernel"])
def draw(request: pytest.FixtureRequest) -> DrawFromLogits:
    if request.param == "torch":
        return draw_from_logits
    kernel = drawing_for(torch.bfloat16, torch.device("cpu")).unfiltered
    assert kernel is not draw_from_logits
    return kernel


def random_rows(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, FloatArray, FloatArray]:
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    uniforms = np.random.default_rng(rows).random(rows)
    temperature = np.random.default_rng(vocab).choice([0.3, 1.0, 2.5], rows)
    return logits, temperature, uniforms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000, 32_000])
def test_logits_and_probabilities_sample_the_same(
    vocab: int, dtype: torch.dtype, draw: DrawFromLogits
) -> None:
    logits, temperature, uniforms = random_rows(40, vocab, dtype)
    scaled = logits.double() / torch.from_numpy(temperature).unsqueeze(1)
    expected = draw_from_weights(torch.softmax(scaled, dim=-1).float(), uniforms)
    drawn = draw(logits, temperature, uniforms)
    # A sample can fall on the rounded boundary between two tokens.
    assert (drawn == expected).sum() >= 39


@pytest.mark.parametrize("offset", [-1e4, -33.0, -24.0, 24.0, 33.0, 1e4])
def test_offset_of_logits_does_not_change_samples(offset: float, draw: DrawFromLogits) -> None:
    logits, _, uniforms = random_rows(40, 1000)
    moved = logits + offset
    ones = np.ones(40)
    expected = draw_from_weights(torch.softmax(moved.double(), dim=-1).float(), uniforms)
    drawn = draw(moved, ones, uniforms)
    assert (drawn == expected).sum() >= 39
