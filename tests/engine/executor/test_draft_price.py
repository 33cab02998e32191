"""The cost of a draft is estimated from the weights read for it."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine.executor.draft_loading import draft_price, weights_of_token
from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec
from engine.shared.config import BUNDLED_MODEL, EngineConfig, ModelConfig, SchedulerConfig
from tests.engine.fixtures import SaveModel

SERVED = read_spec(BUNDLED_MODEL)


def price(spec: ModelSpec, config: EngineConfig | None = None) -> float:
    draft: Any = SimpleNamespace(spec=spec)
    return draft_price(draft, SERVED, torch.float32, config or EngineConfig())


def test_no_drafting_has_no_price() -> None:
    assert draft_price(None, SERVED, torch.float32, EngineConfig()) == 0


def test_half_of_the_layers_cost_half_plus_lm_head() -> None:
    assert price(SERVED) == 1
    half = msgspec.structs.replace(SERVED, num_layers=SERVED.num_layers // 2)
    head = SERVED.hidden_size * SERVED.vocab_size / weights_of_token(SERVED)
    assert price(half) == pytest.approx((1 + head) / 2)


@pytest.mark.parametrize(
    ("served", "drafting", "expected"),
    [(None, None, 1), (None, "int8", 1 / 4), (None, "int4", 1 / 8), ("int8", "int4", 1 / 2)],
)
def test_fewer_bits_cost_less(served: Any, drafting: Any, expected: float) -> None:
    config = EngineConfig(
        model=ModelConfig(quantization=served),
        scheduler=SchedulerConfig(speculative_model_quantization=drafting),
    )
    assert price(SERVED, config) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3-moe-deep", "deepseek3", "gpt-oss", "gemma3"])
def test_the_weights_of_a_token_are_about_those_of_its_checkpoint(
    name: str, checkpoint: SaveModel
) -> None:
    saved = checkpoint(name)
    spec = read_spec(saved.directory)
    total = sum(each.numel() for each in saved.reference.parameters())
    if spec.moe is not None:  # most of its experts are idle
        assert weights_of_token(spec) < total
    else:
        embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
        assert weights_of_token(spec) == pytest.approx(total - embedding, rel=0.05)
