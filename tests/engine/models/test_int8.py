"""8-bit products: error, batch independence, and unsupported cases."""

import pytest
import torch

from engine.models.products import int8
from engine.models.products.int8 import (
    Int8Linear,
    Int8Unsupported,
    Int8WeightLinear,
    prepare_int8,
    takes_8_bit_activations,
)
from engine.models.products.row_blocks import RowBlocks, probe_rows

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(params=["as found", "without VNNI"])
def in_8_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether activations have 8 bits: what this processor does, and what those without VNNI do."""
    chosen = takes_8_bit_activations() if request.param == "as found" else False
    monkeypatch.setattr(int8, "takes_8_bit_activations", lambda: chosen)
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [130, 136, 144])
@pytest.mark.parametrize("biased", [False, True])
def test_error_is_within_rounding(
    in_8_bits: bool, dtype: torch.dtype, inputs: int, biased: bool
) -> None:
    weight = torch.randn(48, inputs).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    product = prepare_int8(weight, bias)
    for rows in (1, 7, 16, 100):
        x = torch.randn(rows, inputs).to(dtype)
        result = product(x)
        assert result.dtype == dtype
        expected = torch.nn.functional.linear(
            x.float(), weight.float(), None if bias is None else bias.float()
        )
        error = (result.float() - expected).norm() / expected.norm()
        assert error < (0.015 if in_8_bits else 0.01), rows


@pytest.mark.usefixtures("in_8_bits")
def test_each_output_and_each_token_has_its_own_range() -> None:
    weight, x = torch.randn(40, 64), torch.randn(6, 64)
    weight *= torch.logspace(-4, 3, 40).unsqueeze(1)
    x *= torch.logspace(-3, 3, 6).unsqueeze(1)
    expected = x @ weight.T
    relative = (prepare_int8(weight)(x) - expected) / (
        x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    )
    assert relative.abs().max() < 0.015


@pytest.mark.usefixtures("in_8_bits")
def test_the_largest_values_do_not_overflow() -> None:
    weight, x = torch.full((8, 512), 3.0), torch.full((5, 512), 7.0)
    assert torch.allclose(prepare_int8(weight)(x), torch.full((5, 8), 3.0 * 7.0 * 512))


def test_a_token_does_not_depend_on_its_neighbours(in_8_bits: bool) -> None:
    linear = prepare_int8(torch.randn(96, 64).bfloat16())
    if not in_8_bits:
        linear = RowBlocks(linear, probe_rows(64, torch.bfloat16))
    x = torch.randn(70, 64).bfloat16()
    together = linear(x)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("in_8_bits")
def test_zeros_stay_zeros() -> None:
    linear = prepare_int8(torch.cat((torch.zeros(3, 16), torch.randn(5, 16))))
    assert not linear(torch.zeros(2, 16)).any()
    assert not linear(torch.randn(2, 16))[:, :3].any()


def test_weights_on_other_devices_are_refused() -> None:
    with pytest.raises(Int8Unsupported, match="--quantization int8 is for models on the CPU"):
        prepare_int8(torch.empty(8, 8, device="meta"))


def test_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_checked", set())
    for product in (Int8Linear, Int8WeightLinear):
        monkeypatch.setattr(product, "__call__", lambda self, x: torch.zeros(len(x), 8))
    with pytest.raises(Int8Unsupported, match="off by"):
        prepare_int8(torch.randn(8, 8))
