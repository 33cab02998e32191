"""Products of 16-bit weights in float32, on processors without 16-bit arithmetic."""

import pytest
import torch

from engine.models.products import converted
from engine.models.products.converted import ConvertedLinear
from engine.models.products.dense import DenseLinear, prepare_linear

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "width"), [(3, 8), (48, 640), (1100, 64), (130, 17000)])
def test_results_equal_float32_rounded_once(
    dtype: torch.dtype, biased: bool, outputs: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, width, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    product = ConvertedLinear(weight, bias)
    for rows in (0, 1, 2, 3, 16, 65):
        x = (torch.randn(rows, width, generator=generator) / width**0.5).to(dtype)
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        result = product(x)
        assert result.dtype == dtype
        assert result.shape == exact.shape
        if rows > 2:
            assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
        else:
            assert torch.allclose(result.double(), exact, rtol=0.02, atol=0.02)


def test_weights_can_be_views() -> None:
    weight, x = torch.randn(96, 700).bfloat16(), torch.randn(9, 96).bfloat16()
    alike = ConvertedLinear(weight.T.contiguous(), None)(x)
    assert torch.equal(ConvertedLinear(weight.T, None)(x), alike)


@pytest.mark.usefixtures("unpackable")
@pytest.mark.parametrize(
    ("dtype", "float32_is_faster", "expected"),
    [
        (torch.bfloat16, True, ConvertedLinear),
        (torch.bfloat16, False, DenseLinear),
        (torch.float32, True, DenseLinear),
    ],
)
def test_unblockable_weights_are_converted_if_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, float32_is_faster: bool, expected: type
) -> None:
    monkeypatch.setattr(converted, "float32_is_faster", lambda: float32_is_faster)
    weight = torch.randn(65, 640).to(dtype)
    assert type(prepare_linear(weight)) is expected
    assert type(prepare_linear(weight)) is expected
