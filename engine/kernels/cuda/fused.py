"""The fused kernels that a decoder calls on a CUDA device, as functions of tensors."""

import torch
import triton
from torch import Tensor

from engine.kernels.cuda import rows
from engine.kernels.reference import computed_by_rows

_GATED_AT_ONCE = 1024


class CudaKernels:
    """See `engine.kernels.registry.FusedKernels`."""

    @computed_by_rows
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each row to a root mean square of one, then by the weights."""
        x = x.contiguous()
        out = torch.empty_like(x)
        count, width = x.shape
        wide = triton.next_power_of_2(width)
        rows.norm_rows[count,](
            x, weight, out, eps, COUNT=width, WIDTH=wide, num_warps=max(1, min(16, wide // 512))
        )
        return out

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each head, in place, to a root mean square of one, then by its weights."""
        tokens, count, dim = heads.shape
        if tokens:
            rows.norm_heads[tokens, count](
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

    @computed_by_rows
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_up = gate_up.contiguous()
        *outer, width = gate_up.shape
        inner = width // 2
        out = torch.empty(*outer, inner, dtype=gate_up.dtype, device=gate_up.device)
        if out.numel():
            grid = out.numel() // inner, -(-inner // _GATED_AT_ONCE)
            rows.gate_rows[grid](gate_up, out, COUNT=inner, AT_ONCE=_GATED_AT_ONCE)
        return out

    def rotate_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys in place, then store keys and values."""
        kv_heads, dim = cache.shape[3:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        rows.rotate_and_store[len(qkv), heads + 2 * kv_heads](
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
