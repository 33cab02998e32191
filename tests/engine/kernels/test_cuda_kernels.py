"""CUDA kernels other than attention: correct results, and bit-identical products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import registry as choice
from engine.kernels.reference import rotate
from engine.models.products.invariant import InvariantLinear
from tests.engine.triton_device import DEVICE, TYPES

pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("dtype", TYPES)]


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def is_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 4e-3 if dtype == torch.float16 else 3e-2
    return torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "has_bias"), [(1, False), (5, True), (64, False), (65, True), (300, False)]
)
def test_products_are_right(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = normal(200, 96, dtype=dtype) * 0.1
    bias = normal(200, dtype=dtype) if has_bias else None
    product = InvariantLinear(weight, bias)
    x, sums = normal(rows, 96, dtype=dtype), normal(rows, 200, dtype=dtype)
    plain = x.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    assert is_close(product(x), plain, dtype)
    assert is_close(product.add_to(sums.clone(), x), plain + sums.float(), dtype)


def test_product_row_has_same_bits_in_batch_of_any_size(dtype: torch.dtype) -> None:
    product = InvariantLinear(normal(136, 288, dtype=dtype), None)
    x = normal(230, 288, dtype=dtype)
    whole = product(x)
    for first, last in ((0, 1), (7, 8), (3, 20), (0, 64), (11, 77), (100, 229)):
        assert torch.equal(product(x[first:last]), whole[first:last])


def test_kernels_are_trusted_in_either_type_of_16_bits(dtype: torch.dtype) -> None:
    from engine.kernels.cuda.fused import CudaKernels

    cuda = torch.device("cuda")
    assert choice.can_compile(dtype, cuda, "operators")
    assert not choice.can_compile(torch.float32, cuda, "operators")
    assert not choice.can_compile(torch.float16, torch.device("cpu"), "operators")
    assert choice._agree(CudaKernels(), dtype, DEVICE)


def test_norms_gates_and_rotations_equal_stock_operators(dtype: torch.dtype) -> None:
    from engine.kernels.cuda.fused import CudaKernels

    kernels = CudaKernels()
    x, weight = normal(5, 200, dtype=dtype), normal(200, dtype=dtype)
    normed = kernels.rms_norm(x, weight.float(), 1e-5)
    assert is_close(normed, F.rms_norm(x.float(), (200,), weight.float(), 1e-5), dtype)
    gate, up = x.float().chunk(2, dim=-1)
    assert is_close(kernels.swiglu(x), F.silu(gate) * up, dtype)
    assert kernels.swiglu(x[:0]).shape == (0, 100)
    heads, weights = normal(5, 4, 36, dtype=dtype)[:, :3], normal(3, 36, dtype=dtype)
    expected = F.rms_norm(heads.float(), (36,), None, 1e-5) * weights
    assert kernels.rms_norm_heads(heads, weights.float(), 1e-5) is heads
    assert is_close(heads, expected, dtype)

    qkv, slots = normal(5, 8 * 36, dtype=dtype), torch.tensor([9, 0, 3, 7, 1], device=DEVICE)
    factors = normal(5, 1, 36, dtype=dtype), normal(5, 1, 36, dtype=dtype)
    heads = qkv.clone().float().view(5, 8, 36)
    heads[:, :6] = rotate(heads[:, :6], *(each.float() for each in factors))
    cache = torch.zeros(5, 2, 2, 2, 36, dtype=dtype, device=DEVICE)
    kernels.rotate_and_store(qkv, *factors, cache, slots)
    assert is_close(qkv.view(5, 8, 36), heads, dtype)
    stored = cache.view(10, 2 * 2, 36)
    assert is_close(stored[slots], heads[:, 4:], dtype)
    assert not stored[[2, 4, 5, 6, 8]].any()
