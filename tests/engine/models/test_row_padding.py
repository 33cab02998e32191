"""Row padding: products run for few row counts, with unchanged results."""

from collections.abc import Callable

import pytest
import torch

from engine.models.module import Rows
from engine.models.products.dense import DenseLinear, prepare_linear
from engine.models.products.int8 import prepare_int8
from engine.models.products.row_padding import padded_rows

SMALL, LARGE = 192 * 320, 896 * 9728


@pytest.mark.parametrize("num_weights", [1, SMALL, 500_000, LARGE])
def test_padding_is_cheap_and_never_removes_rows(num_weights: int) -> None:
    for rows in range(1025):
        added = padded_rows(rows, num_weights) - rows
        assert 0 <= added < 32
        assert added * num_weights <= 1 << 21


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 32, 45, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prepare", [DenseLinear, prepare_linear, prepare_int8])
def test_padded_results_equal_those_of_unpadded_rows(
    prepare: Callable[[torch.Tensor, torch.Tensor], Rows], dtype: torch.dtype, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(24, 64, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    expected = x.float() @ weight.float().T + bias.float()
    result = prepare(weight, bias)(x)
    assert result.shape == (rows, 24)
    assert result.dtype == dtype
    error = (result.float() - expected).norm()
    assert error <= 0.03 * expected.norm()
