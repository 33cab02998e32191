"""Whether a model is computed with fused kernels."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.attention.rotary import rotate

logger = logging.getLogger(__name__)

_Built = TypeVar("_Built")

_TOLERANCE = 0.05
"""Between two ways to round a few standard normal numbers to 8 bits of mantissa."""


class FusedKernels(Protocol):
    """What lies between a decoder's products, in bfloat16.

    Each row is computed by itself, in float32, and rounded once.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale rows [rows, width] to a root mean square of one, then by weights in float32."""
        ...

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do the same with heads, in place, and return them.

        Args:
            heads: [tokens, heads, head_dim], those of a token side by side
            weight: [heads, head_dim] float32
        """
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
    """Return the kernels for activations of this type, each compared with torch's operators.

    None where there are none: for other types and devices, without what compiles them (Numba, on
    CUDA Triton), or if it cannot compile them here.
    """
    replaced = "operators between products"
    if not can_compile(dtype, device, replaced):
        return None
    build = _compiled_for_cpus if device.type == "cpu" else _compiled_for_cuda
    return trusted(build, lambda built: _agree(built, device), replaced)


def can_compile(dtype: torch.dtype, device: torch.device, replaced: str) -> bool:
    """Whether there may be kernels for values of this type on this device.

    Where only what compiles them is missing, the log says that what would be `replaced` stays.
    """
    compiler = {"cpu": "numba", "cuda": "triton"}.get(device.type)
    if dtype != torch.bfloat16 or compiler is None:
        return False
    try:
        import_module(compiler)
    except ImportError as error:  # not installed, or not made for the others' versions
        logger.info("%s are torch's own, without %s: %s", replaced, compiler, error)
        return False
    return True


def _compiled_for_cpus() -> FusedKernels:
    from engine.models.kernels.fused import CompiledKernels

    return CompiledKernels()


def _compiled_for_cuda() -> FusedKernels:
    from engine.models.kernels.cuda.fused import CudaKernels

    return CudaKernels()


def trusted(
    build: Callable[[], _Built], agrees: Callable[[_Built], bool], replaced: str
) -> _Built | None:
    """Build what computes with kernels, which compiles them, and compare it with torch's operators.

    None if that fails or they differ; the log then says that what would be `replaced` stays.
    """
    try:
        built = build()
        if agrees(built):
            return built
        reason = "fused kernels differ from them"
    except Exception as error:  # compilers raise what they like
        reason = str(error) or type(error).__name__
    logger.warning("%s are torch's own: %s", replaced, reason)
    return None


def compiled_for_cpu(
    stock: _Built,
    build: Callable[[], _Built],
    agrees: Callable[[_Built], bool],
    replaced: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> _Built:
    """Return what computes with kernels, where that is trusted, else what they would replace.

    Only for values of this type on a CPU; the other arguments are those of `trusted`.
    """
    if device.type != "cpu" or not can_compile(dtype, device, replaced):
        return stock
    return trusted(build, agrees, replaced) or stock


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether results of a few standard normal numbers differ by no more than how they round."""
    return torch.allclose(one.float(), other.float(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _agree(kernels: FusedKernels, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    x, weight, width = normal(3, 72), normal(72), 72
    normed = kernels.rms_norm(x, weight.float(), 1e-6)
    heads, weights = normal(3, 4, 18)[:, :3], normal(3, 18)
    expected = F.rms_norm(heads, (18,), None, 1e-6) * weights
    gate, up = x.float().chunk(2, dim=-1)
    return (
        is_close(normed, F.rms_norm(x, (width,), weight, 1e-6))
        and is_close(kernels.rms_norm_heads(heads, weights.float(), 1e-6), expected)
        and is_close(kernels.swiglu(x), F.silu(gate) * up)
        and _stores_agree(kernels, x, (normal(3, 1, 18), normal(3, 1, 18)))
    )


def _stores_agree(kernels: FusedKernels, qkv: Tensor, factors: tuple[Tensor, Tensor]) -> bool:
    """Compare what becomes of three tokens with two query heads and one KV head."""
    cache = torch.zeros(2, 2, 2, 1, 18, dtype=qkv.dtype, device=qkv.device)
    slots = torch.tensor([2, 0, 3], device=qkv.device)
    expected = qkv.clone().view(3, 4, 18)
    expected[:, :3] = rotate(expected[:, :3], *factors)
    rotated = qkv.clone()
    kernels.rotate_and_store(rotated, *factors, cache, slots)
    stored = cache.view(4, 2, 18)
    return (
        is_close(rotated.view(3, 4, 18), expected)
        and is_close(stored[slots], expected[:, 2:])
        and not stored[1].any()
    )
