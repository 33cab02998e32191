"""Row-wise kernels compared with plain formulas in float64."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.rows import CompiledKernels
from engine.kernels.reference import rotate
from engine.models.attention.rotary import rotary_table, rotation
from engine.models.spec import RopeSpec

pytestmark = pytest.mark.usefixtures("inference")

KERNELS = CompiledKernels()
EPS = 1e-6
SHAPES = [(1, 8), (3, 40), (16, 896), (70, 1000)]
"""The last one has enough values for all threads."""


def is_rounded(result: Tensor, exact: Tensor) -> bool:
    """Return whether values are within one unit in the last place of 8 bits of the exact ones."""
    return torch.allclose(result.double(), exact, rtol=2.0**-7, atol=1e-30)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.double()
    return exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm_equals_reference(rows: int, width: int) -> None:
    x, weight = (torch.randn(rows, width) * 3).bfloat16(), torch.randn(width)
    assert is_rounded(KERNELS.rms_norm(x, weight, EPS), normed(x, weight))


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (4, 40), (2, 6), (24, 128)])
@pytest.mark.parametrize("tokens", [0, 1, 5, 200])
def test_rms_norm_of_interleaved_heads_equals_reference(
    heads: int, head_dim: int, tokens: int
) -> None:
    qkv = (torch.randn(tokens, heads + 3, head_dim) * 3).bfloat16()
    before, weight = qkv.clone(), torch.randn(heads, head_dim)
    result = KERNELS.rms_norm_heads(qkv[:, :heads], weight, EPS)
    assert result.data_ptr() == qkv.data_ptr()
    assert is_rounded(result, normed(before[:, :heads], weight))
    assert torch.equal(qkv[:, heads:], before[:, heads:]), "the others stay"
    alone = KERNELS.rms_norm_heads(before[-1:, :heads], weight, EPS)
    assert torch.equal(alone, result[-1:])


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_swiglu_equals_reference(rows: int, width: int) -> None:
    x = (torch.randn(rows, 2 * width) * 5).bfloat16()
    assert is_rounded(KERNELS.swiglu(x), gated(x))
    stacked = x.view(1, rows, -1)
    assert torch.equal(KERNELS.swiglu(stacked), KERNELS.swiglu(x).view(1, rows, -1))


def test_swiglu_equals_reference_for_every_gate() -> None:
    """All bfloat16 numbers, except products that are not normal float32 numbers."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gates = bits.view(torch.bfloat16)
    gates = gates[gates.isfinite() & (gates > -80)]
    ones = torch.ones_like(gates)
    result = KERNELS.swiglu(torch.cat((gates, ones)).unsqueeze(0))[0]
    exact = gates.double() * torch.sigmoid(gates.double())
    assert is_rounded(result, torch.where(exact.abs() < 1e-30, result.double(), exact))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    x = torch.randn(3, 80).bfloat16()
    broken = x.clone()
    broken[1, 70] = value
    norm = KERNELS.rms_norm(broken, torch.ones(80), EPS)
    gate = KERNELS.swiglu(broken)
    assert not norm[1].isfinite().all()
    assert not gate[1].isfinite().all()
    assert torch.equal(norm[::2], KERNELS.rms_norm(x, torch.ones(80), EPS)[::2])
    assert torch.equal(gate[::2], KERNELS.swiglu(x)[::2])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 40), (2, 1, 6)])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_rotate_and_store_equals_reference(
    heads: int, kv_heads: int, head_dim: int, tokens: int
) -> None:
    table = rotary_table(
        RopeSpec(theta=10000.0), head_dim, 300, torch.bfloat16, torch.device("cpu")
    )
    factors = rotation(table, torch.randint(0, 300, (tokens,)))
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).bfloat16()
    slots = torch.randperm(240)[:tokens]
    cache = torch.randn(30, 8, 2, kv_heads, head_dim).bfloat16()
    kept, split = cache.clone(), qkv.clone().view(tokens, -1, head_dim)

    KERNELS.rotate_and_store(qkv, *factors, cache, slots)

    rotated = rotate(split[:, : heads + kv_heads].double(), *(each.double() for each in factors))
    result = qkv.view(tokens, -1, head_dim)
    assert torch.allclose(result[:, : heads + kv_heads].double(), rotated, rtol=2**-8, atol=2**-8)
    assert torch.equal(result[:, heads + kv_heads :], split[:, heads + kv_heads :])
    kept.view(240, -1)[slots] = qkv[:, heads * head_dim :]
    assert torch.equal(cache, kept), "and nothing else is touched"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_row_has_same_bits_in_any_batch_and_thread(threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight = torch.randn(130, 900).bfloat16(), torch.randn(900)
    norm, gate = KERNELS.rms_norm(x, weight, EPS), KERNELS.swiglu(x)
    for first, end in ((0, 1), (7, 20), (50, 130)):
        some = x[first:end]
        assert torch.equal(KERNELS.rms_norm(some, weight, EPS), norm[first:end])
        assert torch.equal(KERNELS.swiglu(some), gate[first:end])


def test_non_contiguous_rows_are_supported() -> None:
    x = torch.randn(6, 64).bfloat16()
    weight = torch.ones(32)
    assert torch.equal(
        KERNELS.rms_norm(x[:, 32:], weight, EPS), KERNELS.rms_norm(x[:, 32:].clone(), weight, EPS)
    )
    assert torch.equal(KERNELS.swiglu(x[::2]), KERNELS.swiglu(x[::2].clone()))


def test_empty_input_is_supported() -> None:
    nothing = torch.empty(0, 64).bfloat16()
    assert KERNELS.rms_norm(nothing, torch.ones(64), EPS).shape == (0, 64)
    assert KERNELS.swiglu(nothing).shape == (0, 32)
