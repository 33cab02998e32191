"""Products with 4-bit weights: their error, and where they are refused."""

import json
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from engine.kernels.processor import is_x86
from engine.models.formats.checkpoint import DummyCheckpoint
from engine.models.hf_config import read_spec
from engine.models.loading.decoder import DecoderLoader
from engine.models.products.int4 import (
    MIDDLE,
    ExpandedInt4,
    Int4Linear,
    Int4Unsupported,
    Int4Weights,
    fits_int4,
    joined,
    pack,
    packed_block,
    quantized,
    require_int4,
)
from engine.models.settings import ComputeTypes
from tests.engine.quantized_files import dense

pytestmark = pytest.mark.usefixtures("inference")


def _weights(outputs: int, inputs: int, groups: int) -> Int4Weights:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (outputs, groups)).float()
    return Int4Weights(codes, torch.rand(outputs, groups) * 0.01 + 0.001, zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("outputs", [48, 192])
@pytest.mark.parametrize("biased", [False, True])
def test_int4_error_equals_that_of_16_bits(
    dtype: torch.dtype, rows: int, outputs: int, biased: bool
) -> None:
    weights = _weights(outputs, 192, 3)
    x = torch.randn(rows, 192).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    result = Int4Linear(weights, bias, dtype)(x)
    assert result.dtype == dtype
    expected = torch.nn.functional.linear(
        x.float(), dense(weights), None if bias is None else bias.float()
    )
    assert (result.float() - expected).norm() / expected.norm() < 0.006


@pytest.mark.parametrize("compute_type", [torch.float32, torch.bfloat16])
def test_expanded_weights_equal_packed_ones(compute_type: torch.dtype) -> None:
    outputs, inputs = 64 * 40, 512  # more than are expanded at once
    weights = _weights(outputs, inputs, 4)
    offsets = (MIDDLE - weights.zeros) * weights.scales
    scales = torch.stack((weights.scales.T, offsets.T), dim=2)
    block = packed_block(outputs)
    if block is None:  # torch packs in another way than what is read here
        assert not is_x86()
        return
    product = ExpandedInt4(pack(weights.codes), scales, block, compute_type)
    identity = torch.eye(inputs, dtype=compute_type)
    expected = dense(weights).T.to(compute_type)
    assert torch.allclose(product(identity), expected, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("inputs", [32, 64, 96, 384])
def test_rounding_is_off_by_half_a_step_at_most_and_keeps_zeros(inputs: int) -> None:
    weight = torch.randn(20, inputs) * torch.logspace(-3, 3, 20).unsqueeze(1)
    weight[3] = 0.0
    weight[4] = weight[4].abs() + 1.0
    rounded = quantized(weight)
    assert rounded is not None
    steps = rounded.scales.repeat_interleave(inputs // rounded.scales.shape[1], 1)
    assert ((dense(rounded) - weight).abs() <= 1.01 * steps).all()
    assert not dense(rounded)[3].any()
    error = (dense(rounded) - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    assert error.max() < 0.12


def test_fused_weights_are_concatenated() -> None:
    parts = [_weights(16, 64, 2), _weights(32, 64, 2)]
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(dense(whole), torch.cat([dense(part) for part in parts]))
    assert joined([*parts, _weights(16, 64, 1)]) is None


def test_shapes_that_the_product_does_not_support_are_reported() -> None:
    assert quantized(torch.randn(16, 40)) is None
    assert fits_int4(_weights(16, 64, 2))
    assert not fits_int4(_weights(8, 64, 2))
    assert not fits_int4(_weights(16, 96, 2))


def test_other_types_and_devices_are_refused() -> None:
    with pytest.raises(Int4Unsupported, match=r"--quantization int4 .* --dtype bfloat16"):
        require_int4("int4", torch.float32, torch.device("cpu"))
    with pytest.raises(Int4Unsupported, match=r"--quantization stored .*--device cpu"):
        require_int4("stored", torch.bfloat16, torch.device("cuda"))


class Counting(DummyCheckpoint):
    """Counts how often each tensor is asked for."""

    asked: ClassVar[Counter[str]] = Counter()

    def tensor(self, name: str) -> torch.Tensor:
        self.asked[name] += 1
        return super().tensor(name)


def test_weights_of_shapes_that_stay_in_16_bits_are_read_once(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 40, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 50, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    Counting.asked.clear()
    DecoderLoader(
        spec,
        Counting(tmp_path, spec, 0, torch.bfloat16),
        types=ComputeTypes(torch.bfloat16, torch.bfloat16),
        device=torch.device("cpu"),
        max_model_len=64,
        quantization="int4",
    ).load()
    assert Counting.asked["model.layers.0.mlp.up_proj.weight"] == 1
    assert set(Counting.asked.values()) == {1}
