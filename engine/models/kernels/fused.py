"""The fused kernels that a decoder calls, as functions of tensors.

All take bfloat16 on a CPU. What they compute of a row does not depend on the others.
"""

import torch
from torch import Tensor

from engine.models.kernels import rows
from engine.models.kernels.compiling import bits_of, threads_for
from engine.models.products.row_blocks import computed_by_rows

_SHARED_VALUES = 1 << 15
"""Values from which on a kernel of rows has all threads: one takes some 10 us for as many."""


class CompiledKernels:
    """See `engine.models.kernels.choice.FusedKernels`."""

    @computed_by_rows
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each row to a root mean square of one, then by the weights."""
        x = x.contiguous()
        out = torch.empty_like(x)
        count, width = x.shape
        addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        rows.rms_norm(_threads(count, x), *addresses, count, width, bits_of(eps))
        return out

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each head, in place, to a root mean square of one, then by its weights."""
        tokens, count, dim = heads.shape
        stride = heads.stride(0)
        addresses = heads.data_ptr(), weight.data_ptr()
        threads = _threads(tokens, heads)
        rows.rms_norm_heads(threads, *addresses, tokens, stride, count, dim, bits_of(eps))
        return heads

    @computed_by_rows
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_up = gate_up.contiguous()
        *outer, width = gate_up.shape
        out = torch.empty(*outer, width // 2, dtype=gate_up.dtype)
        count = out.numel() // (width // 2)
        rows.swiglu(_threads(count, out), gate_up.data_ptr(), out.data_ptr(), count, width // 2)
        return out

    def rotate_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys in place, then store keys and values."""
        kv_heads, dim = cache.shape[3:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        tensors = qkv, cos, sin, cache, slots
        addresses = [each.data_ptr() for each in tensors]
        threads = _threads(len(qkv), qkv)
        rows.rotate_and_store(threads, *addresses, len(qkv), heads, kv_heads, dim)


def _threads(rows: int, values: Tensor) -> int:
    return threads_for(rows, values.numel(), _SHARED_VALUES)
