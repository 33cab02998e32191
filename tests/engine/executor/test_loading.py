"""Conversion of weights on loading, by settings and processor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.executor.loading import load_model
from engine.models import settings
from engine.models.hf_config import read_spec
from engine.models.module import Rows
from engine.models.products.int4 import Int4Linear
from engine.models.settings import ComputeTypes, quantization
from engine.shared.config import EngineConfig, ModelConfig
from tests.engine.fixtures import SaveModel
from tests.engine.gguf_files import write_gguf

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture
def without_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable 16-bit products, and the preference for float32 in small models."""
    monkeypatch.setattr(settings, "has_16_bit_kernels", lambda: False)
    monkeypatch.setattr(settings, "_CACHED_WEIGHTS", 0)


def chosen(types: torch.dtype = BF16, device: torch.device = CPU, **model: Any) -> str | None:
    is_alone = model.pop("is_alone", True)
    computed = ComputeTypes(types, types)
    return quantization(ModelConfig(**model), computed, device=device, in_one_process=is_alone)


@pytest.mark.usefixtures("without_16_bits")
def test_stored_4_bits_are_kept_unless_dtype_is_set_or_weights_are_sharded() -> None:
    assert chosen() == "stored"
    assert chosen(quantization="int8") == "int8"
    assert chosen(quantization="stored", dtype="bfloat16", is_alone=False) == "stored"
    assert chosen(F32) is None
    assert chosen(dtype="bfloat16") is None
    assert chosen(device=torch.device("cuda")) is None
    assert chosen(is_alone=False) is None


def test_stored_4_bits_are_expanded_where_16_bits_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "has_16_bit_kernels", lambda: True)
    assert chosen() is None


@pytest.mark.usefixtures("without_16_bits")
@pytest.mark.parametrize(("kind", "kept"), [(Kind.Q4_1, True), (Kind.Q8_0, False)])
def test_a_file_with_4_bits_is_served_with_them(
    kind: Kind, kept: bool, checkpoint: SaveModel, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, checkpoint("llama").directory, "llama", kind)

    def product(**setting: Any) -> Rows:
        config = EngineConfig(model=ModelConfig(model=str(path), **setting))
        model = load_model(config, CPU, lambda _: None).model
        assert model.dtype == BF16
        layer: Any = model.layers[1]
        product: Rows = layer.self_attn.o_proj
        return product

    stored, expanded = product(), product(dtype="bfloat16")
    assert isinstance(stored, Int4Linear) is kept
    assert isinstance(product(quantization="stored", dtype="bfloat16"), Int4Linear) is kept
    assert not isinstance(expanded, Int4Linear)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        expected = expanded(x).float()
        assert (stored(x).float() - expected).norm() < 0.01 * expected.norm()


def test_quality_losses_are_logged_at_start(
    checkpoint: SaveModel, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(name: str, **model: Any) -> list[str]:
        caplog.clear()
        settings = ModelConfig(model=str(checkpoint(name).directory), **model)
        load_model(EngineConfig(model=settings), CPU, lambda _: None)
        return [record.getMessage() for record in caplog.records]

    (message,) = lost("phi3-long")
    assert "use the frequencies for long ones, as --max-model-len 256 is more than 64" in message
    assert lost("phi3-long", max_model_len=64) == []
    (message,) = lost("llama", quantization="int8", dtype="bfloat16")
    assert "perplexity of one of 135 million rose by 4.2 %" in message
    assert lost("llama") == []


def test_larger_models_lose_less_by_rounding(
    checkpoint: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(checkpoint("llama").directory)
    assert len(settings.losses(spec, 256, "int4")) == 1
    assert settings.losses(spec, 256, "stored") == []
    monkeypatch.setattr(settings, "_SMALL", 1)
    assert settings.losses(spec, 256, "int4") == []
