"""Products in 8 bits: their error, what they do not depend on, and where they are refused."""

import pytest
import torch

from engine.models.products import int8
from engine.models.products.int8 import (
    EIGHT_BITS,
    SEVEN_BITS,
    ActivationRange,
    Int8Unsupported,
    activation_range,
    prepare_int8,
)

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(params=["as found", "without VNNI"])
def activations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ActivationRange:
    """The range of this processor, and that of one whose sums of 8-bit products overflow."""
    chosen = activation_range() if request.param == "as found" else SEVEN_BITS
    monkeypatch.setattr(int8, "activation_range", lambda: chosen)
    return chosen


def expected_error(activations: ActivationRange) -> float:
    """Return how far a product may be off, relative to its size."""
    return {EIGHT_BITS: 0.015, SEVEN_BITS: 0.022}[activations]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_error_is_that_of_rounding(
    activations: ActivationRange, dtype: torch.dtype, rows: int, biased: bool
) -> None:
    weight, x = torch.randn(48, 130).to(dtype), torch.randn(rows, 130).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    result = prepare_int8(weight, bias)(x)
    assert result.dtype == dtype
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    error = (result.float() - expected).norm() / expected.norm()
    assert error < expected_error(activations)


def test_each_output_and_each_token_has_a_range_of_its_own(activations: ActivationRange) -> None:
    weight, x = torch.randn(40, 64), torch.randn(6, 64)
    weight *= torch.logspace(-4, 3, 40).unsqueeze(1)
    x *= torch.logspace(-3, 3, 6).unsqueeze(1)
    expected = x @ weight.T
    relative = (prepare_int8(weight)(x) - expected) / (
        x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    )
    assert relative.abs().max() < expected_error(activations)


def test_the_largest_values_do_not_overflow(activations: ActivationRange) -> None:
    weight, x = torch.full((8, 512), 3.0), torch.full((5, 512), 7.0)
    assert torch.allclose(prepare_int8(weight)(x), torch.full((5, 8), 3.0 * 7.0 * 512))


@pytest.mark.usefixtures("activations")
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    linear = prepare_int8(torch.randn(96, 64).bfloat16())
    x = torch.randn(70, 64).bfloat16()
    together = linear(x)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("activations")
def test_zeros_stay_zeros() -> None:
    linear = prepare_int8(torch.cat((torch.zeros(3, 16), torch.randn(5, 16))))
    assert not linear(torch.zeros(2, 16)).any()
    assert not linear(torch.randn(2, 16))[:, :3].any()


def test_weights_elsewhere_than_on_the_cpu_are_refused() -> None:
    with pytest.raises(Int8Unsupported, match="--quantization int8 is for models on the CPU"):
        prepare_int8(torch.empty(8, 8, device="meta"))


def test_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_checked", set())
    monkeypatch.setattr(int8.Int8Linear, "__call__", lambda self, x: torch.zeros(len(x), 8))
    with pytest.raises(Int8Unsupported, match="off by"):
        prepare_int8(torch.randn(8, 8))
