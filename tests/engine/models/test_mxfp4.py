"""MXFP4 experts: decoded values, and weights that stay packed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from engine.models.formats.checkpoint import SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError
from engine.models.hf_config import read_spec
from engine.models.moe import Expert
from engine.models.parallel.tensors import TensorSharding
from engine.models.products.int8 import Int8Linear, Int8WeightLinear
from engine.models.products.mxfp4 import Mxfp4Linear, Mxfp4Weights
from engine.models.spec import UnsupportedModel
from tests.engine.fixtures import LoadDriver, SaveModel

E2M1 = {
    0b000: 0.0, 0b001: 0.5, 0b010: 1.0, 0b011: 1.5, 0b100: 2.0, 0b101: 3.0, 0b110: 4.0, 0b111: 6.0,
}  # fmt: skip
"""Magnitudes by the three bits behind the sign: OCP Microscaling Formats, version 1.0."""


def value(code: int, scale: int) -> float:
    """Return what four bits stand for below a scale of eight bits (E8M0)."""
    sign = -1.0 if code & 0b1000 else 1.0
    return sign * E2M1[code & 0b111] * 2.0 ** (scale - 127)


def random_weights(outputs: int, inputs: int) -> Mxfp4Weights:
    generator = torch.Generator().manual_seed(1)
    shape = (outputs, inputs // 32)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return Mxfp4Weights(
        blocks, torch.randint(118, 125, shape, generator=generator, dtype=torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_and_scale_expands_as_specified(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(-1, 16).contiguous()
    expected = torch.tensor(
        [
            [value(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)]
            for scale in range(255)
        ],
        dtype=torch.float64,
    ).to(dtype)
    assert torch.equal(Mxfp4Weights(blocks.contiguous(), scales).expanded(dtype), expected)


def test_nan_scale_gives_nan() -> None:
    blocks, scales = torch.full((1, 1, 16), 0x22, dtype=torch.uint8), torch.tensor([[255]])
    whole = Mxfp4Weights(blocks, scales.to(torch.uint8)).expanded(torch.float32)
    assert whole.isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_products_equal_those_of_expanded_weight(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.products.mxfp4._AT_ONCE", 64 * 30)
    weights, bias, x = random_weights(100, 64), torch.randn(100), torch.randn(rows, 64)
    product = Mxfp4Linear(weights, bias, torch.float32)
    expected = F.linear(x, weights.expanded(torch.float32), bias)
    torch.testing.assert_close(product(x), expected)


def experts(driver: Any) -> Iterator[Expert]:
    """Yield the experts of a loaded model."""
    for layer in driver.runner.model.sparse_layers.values():
        yield from layer.experts


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_stay_packed(
    quantization: str | None, checkpoint: SaveModel, driver: LoadDriver
) -> None:
    directory = checkpoint("gpt-oss-mxfp4").directory
    engine = driver(directory, quantization=quantization, dtype="bfloat16")
    products = [part for each in experts(engine) for part in (each.gate_up_proj, each.down_proj)]
    assert len(products) == 2 * 3 * 6
    held = 0
    for product in products:
        assert isinstance(product, Mxfp4Linear)
        held += sum(tensor.nbytes for part in product._parts for tensor in part)
    tensors = load_file(directory / "model.safetensors")
    stored = [each for name, each in tensors.items() if name.endswith(("_blocks", "_scales"))]
    assert held == sum(tensor.nbytes for tensor in stored)


def test_int8_rounds_experts(checkpoint: SaveModel, driver: LoadDriver) -> None:
    engine = driver(checkpoint("gpt-oss-mxfp4").directory, quantization="int8", dtype="bfloat16")
    kinds = Int8Linear, Int8WeightLinear
    assert all(isinstance(each.down_proj, kinds) for each in experts(engine))


def test_blocks_with_mismatched_scales_are_refused_by_name(
    checkpoint: SaveModel, tmp_path: Path
) -> None:
    directory = checkpoint("gpt-oss-mxfp4").directory
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong in (tensors[name][:, :-1], tensors[name].float()):
        save_file({**tensors, name: wrong.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.down_proj_blocks"):
            SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))
    without = {other: each for other, each in tensors.items() if other != name}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.down_proj_blocks"):
        SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))


def test_other_families_refuse_mxfp4(checkpoint: SaveModel, tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama").directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"mxfp4.*LlamaForCausalLM"):
        read_spec(tmp_path)


def test_more_shards_than_blocks_are_refused_at_start(checkpoint: SaveModel) -> None:
    spec = read_spec(checkpoint("gpt-oss-mxfp4").directory)  # 96 inner outputs: three blocks
    widths = [TensorSharding(spec, rank, 2).spec.moe for rank in range(2)]
    assert [moe.intermediate_size for moe in widths if moe is not None] == [32, 64]
    with pytest.raises(UnsupportedModel, match=r"tensor-parallel-size 4.*blocks of 32"):
        TensorSharding(spec, 0, 4)
