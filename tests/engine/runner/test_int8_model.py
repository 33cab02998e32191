"""Whole models in 8 bits: how far they are from the ones that they were rounded from."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.shared.config import BUNDLED_MODEL
from tests.test_bundled_model import PASSAGE


def relative(values: torch.Tensor, reference: torch.Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def test_bundled_model_keeps_its_logits_and_its_perplexity(driver):
    tokenizer = Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json"))
    tokens = tokenizer.encode(PASSAGE).ids
    logits, perplexity = {}, {}
    for quantization in (None, "int8"):
        engine = driver(BUNDLED_MODEL, quantization=quantization)
        engine.start(0, tokens)
        logits[quantization] = engine.logits({0: len(tokens)}).float()
        logprobs = torch.log_softmax(logits[quantization][:-1], dim=-1)
        of_text = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
        perplexity[quantization] = math.exp(-of_text.mean())
    assert relative(logits["int8"], logits[None]) < 0.015
    assert perplexity["int8"] == pytest.approx(perplexity[None], rel=0.005)
    same = logits["int8"].argmax(dim=-1) == logits[None].argmax(dim=-1)
    assert same.float().mean() > 0.97


@pytest.mark.parametrize(
    "name", ["llama-biased", "qwen3", "mixtral", "qwen3-moe-many", "gemma3", "glm4"]
)
def test_every_kind_of_layer_is_close_in_8_bits(name, checkpoint, driver, prompt):
    directory = checkpoint(name).directory
    exact, quantized = driver(directory), driver(directory, quantization="int8")
    tokens = prompt(60)
    exact.start(0, tokens)
    quantized.start(0, tokens)
    expected = exact.logits({0: 60})
    errors = (quantized.logits({0: 60}) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.1  # a router may choose another expert for a few tokens


def test_tokens_in_8_bits_do_not_depend_on_the_batch(checkpoint, driver, prompt):
    directory = checkpoint("llama").directory
    alone, together = (driver(directory, quantization="int8") for _ in range(2))
    alone.start(0, prompt(30))
    alone.prefill(0)
    alone.decode(20, 0)
    for slot in range(5):
        together.start(slot, prompt(30 + slot))
        together.prefill(slot)
    together.decode(20, *range(5))
    assert together.tokens[0] == alone.tokens[0]
