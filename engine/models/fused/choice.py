"""Whether a model is computed with fused kernels."""

import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05
"""Between two ways to round a few standard normal numbers to 8 bits of mantissa."""


class FusedKernels(Protocol):
    """What lies between a decoder's products, in bfloat16, on a CPU.

    Each row is computed by itself, in float32, and rounded once.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale rows [rows, width] to a root mean square of one, then by weights in float32."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for [.., 2 * inner] with the gates in the first half."""
        ...

    def rotate_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Rotate queries and keys in place, then store keys and values.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim]
            cos, sin: [tokens, 1, head_dim] from `engine.models.attention.rotary.rotation`
            cache: [blocks, block_size, 2, kv_heads, head_dim]
            slots: [tokens] int64, flat slots of the cache
        """
        ...


def fused_kernels(dtype: torch.dtype, device: torch.device) -> FusedKernels | None:
    """Return the kernels for activations of this type; norms and gates are compared with torch's.

    None where there are none: for other types and devices, without Numba, or if it cannot compile
    them here.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return None
    try:
        from numba.core.errors import NumbaError
    except ImportError:
        logger.info("numba is not installed: operators between products are torch's own")
        return None
    try:
        from engine.models.fused.kernels import CompiledKernels

        kernels = CompiledKernels()
        agrees = _agree(kernels)
    except (NumbaError, OSError, RuntimeError) as error:
        logger.warning("operators between products are torch's own: %s", error)
        return None
    if not agrees:
        logger.warning("fused kernels differ from torch's operators: they are not used")
    return kernels if agrees else None


def _agree(kernels: FusedKernels) -> bool:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, weight, width = normal(3, 72), normal(72), 72
    normed = kernels.rms_norm(x, weight.float(), 1e-6)
    gate, up = x.float().chunk(2, dim=-1)
    return _is_close(normed, F.rms_norm(x, (width,), weight, 1e-6)) and _is_close(
        kernels.swiglu(x), F.silu(gate) * up
    )


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE)
