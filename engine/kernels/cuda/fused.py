"""The fused kernels of a decoder on a CUDA device, as functions of tensors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.reference import row_independent


@triton.jit
def norm_rows(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Scale a row [COUNT] to a root mean square of one, then by the weights; one program per row.

    Args:
        weight: [COUNT] float32
        WIDTH: COUNT or the next power of two
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    is_there = place < COUNT
    values = tl.load(x + row * COUNT + place, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / COUNT + eps)
    scaled = values * factor * tl.load(weight + place, mask=is_there, other=0.0)
    tl.store(out + row * COUNT + place, scaled.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def norm_heads(
    heads: tl.tensor,
    weight: tl.tensor,
    token_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Scale a head, in place, as in `norm_rows`; one program per token and head.

    Args:
        heads: [tokens, HEADS, DIM], tokens `token_stride` apart
        weight: [HEADS, DIM] float32
        WIDTH: DIM or the next power of two
    """
    head = tl.program_id(1)
    place = tl.arange(0, WIDTH)
    is_there = place < DIM
    own = heads + tl.program_id(0).to(tl.int64) * token_stride + head * DIM + place
    values = tl.load(own, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    scaled = values * factor * tl.load(weight + head * DIM + place, mask=is_there, other=0.0)
    tl.store(own, scaled.to(heads.dtype.element_ty), mask=is_there)


@triton.jit
def gate_rows(
    gate_up: tl.tensor, out: tl.tensor, COUNT: tl.constexpr, AT_ONCE: tl.constexpr
) -> None:
    """Write silu(gate) * up of [rows, 2 * COUNT], gates first; one program per part of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_there = place < COUNT
    gate = tl.load(gate_up + row * 2 * COUNT + place, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * COUNT + COUNT + place, mask=is_there, other=0.0)
    gated = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out + row * COUNT + place, gated.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def rotate_and_store(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Rotate a query or key in place, and store keys and values; one program per token and head.

    Args:
        qkv: [tokens, HEADS + 2 * KV_HEADS, DIM]
        cos, sin: [tokens, DIM], as in `engine.kernels.reference.rotate`
        cache: [slots, 2, KV_HEADS, DIM]
        slots: [tokens] int64
        WIDTH: half of DIM or the next power of two
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, WIDTH)
    is_there = half < DIM // 2
    own = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    one = tl.load(own, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(own + DIM // 2, mask=is_there, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        turn = cos + token * DIM + half
        tilt = sin + token * DIM + half
        cos_one = tl.load(turn, mask=is_there, other=0.0).to(tl.float32)
        cos_other = tl.load(turn + DIM // 2, mask=is_there, other=0.0).to(tl.float32)
        sin_one = tl.load(tilt, mask=is_there, other=0.0).to(tl.float32)
        sin_other = tl.load(tilt + DIM // 2, mask=is_there, other=0.0).to(tl.float32)
        turned = one * cos_one + other * sin_one
        other = other * cos_other + one * sin_other
        one = turned
        tl.store(own, one.to(qkv.dtype.element_ty), mask=is_there)
        tl.store(own + DIM // 2, other.to(qkv.dtype.element_ty), mask=is_there)
    if head >= HEADS:
        slot = tl.load(slots + token)
        kept = cache + (slot * 2 * KV_HEADS + head - HEADS) * DIM + half
        tl.store(kept, one.to(cache.dtype.element_ty), mask=is_there)
        tl.store(kept + DIM // 2, other.to(cache.dtype.element_ty), mask=is_there)


_GATED_AT_ONCE = 1024


class CudaKernels:
    """See `engine.kernels.registry.FusedKernels`."""

    @row_independent
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each row to a root mean square of one, then by the weights."""
        x = x.contiguous()
        out = torch.empty_like(x)
        count, width = x.shape
        wide = triton.next_power_of_2(width)
        norm_rows[count,](
            x, weight, out, eps, COUNT=width, WIDTH=wide, num_warps=max(1, min(16, wide // 512))
        )
        return out

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each head, in place, to a root mean square of one, then by its weights."""
        tokens, count, dim = heads.shape
        if tokens:
            norm_heads[tokens, count](
                heads,
                weight,
                heads.stride(0),
                eps,
                HEADS=count,
                DIM=dim,
                WIDTH=triton.next_power_of_2(dim),
                num_warps=1,
            )
        return heads

    @row_independent
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_up = gate_up.contiguous()
        *outer, width = gate_up.shape
        inner = width // 2
        out = torch.empty(*outer, inner, dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            grid = out.numel() // inner, -(-inner // _GATED_AT_ONCE)
            gate_rows[grid](gate_up, out, COUNT=inner, AT_ONCE=_GATED_AT_ONCE)
        return out

    def rotate_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys in place, then store keys and values."""
        kv_heads, dim = cache.shape[3:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        rotate_and_store[len(qkv), heads + 2 * kv_heads](
            qkv,
            cos,
            sin,
            cache,
            slots,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim // 2),
            num_warps=1,
        )
