"""Selects kernels for models, attention and products, or torch's operators as the fallback.

The fallbacks are in `engine.kernels.reference`. A kernel is used if its kind of processor was
measured (`engine.kernels.processor.MEASURED`), it compiles here, and it agrees with the fallback.
Kernel compilers are imported on demand.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.processor import float32_is_faster
from engine.kernels.reference import (
    ChooseExperts,
    Experts,
    GateChosen,
    choose_experts,
    gating,
    rotate,
    swiglu,
    weighted_experts,
)
from engine.kernels.trust import is_close, trusted

logger = logging.getLogger(__name__)

_Built = TypeVar("_Built")

_COMPILERS: Mapping[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "cpu": ("numba", (torch.bfloat16,)),
    "cuda": ("triton", (torch.bfloat16, torch.float16)),
}
"""Compiler and supported dtypes by device type."""
_PROBED_EXPERTS = 4, 2, 60
"""Numbers of experts, of experts per token, and of tokens for the comparison."""


class ProductWithAddends(Protocol):
    """A product with optional addends."""

    def __call__(self, x: Tensor, addends: Tensor | None = None) -> Tensor:
        """Map [rows, in] to [rows, out], plus addends of that shape."""
        ...


class ExpertsKernel(Experts, Protocol):
    """A kernel for all experts of one layer, with their weights."""

    weights: list[tuple[Tensor, Tensor]]
    """Weights of each expert, in the kernel's layout."""


MakeExperts = Callable[[Iterable[tuple[Tensor, Tensor]]], ExpertsKernel]
"""Repacks each expert's weights [2 * inner, hidden] and [hidden, inner]."""


class FusedKernels(Protocol):
    """Operations between a decoder's products, in bfloat16, on CUDA also in float16.

    Each row is computed separately, in float32, and rounded once.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale rows [rows, width] to a root mean square of one, then by weights in float32."""
        ...

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale heads as in `rms_norm`, in place, and return them.

        Args:
            heads: [tokens, heads, head_dim], with the heads of a token contiguous
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
    """Return the kernels for activations of this dtype, compared with torch's operators.

    None for other dtypes and devices, without the compiler (Numba, on CUDA Triton), or if
    compilation or the comparison fails.
    """
    replaced = "operators between products"
    if not can_compile(dtype, device, replaced):
        return None

    def build() -> FusedKernels:
        if device.type == "cpu":
            from engine.kernels.cpu.rows import CompiledKernels

            return CompiledKernels()
        from engine.kernels.cuda.fused import CudaKernels

        return CudaKernels()

    return trusted(build, lambda built: _agree(built, dtype, device), replaced)


def can_compile(dtype: torch.dtype, device: torch.device, replaced: str) -> bool:
    """Return whether there are kernels for this dtype and device, and their compiler is installed.

    If only the compiler is missing, logs that torch's operators named by `replaced` are used.
    """
    compiler, types = _COMPILERS.get(device.type, ("", ()))
    if dtype not in types:
        return False
    try:
        import_module(compiler)
    except ImportError as error:  # not installed, or incompatible versions
        logger.info("%s are torch's own, without %s: %s", replaced, compiler, error)
        return False
    return True


def compiled_for_cpu(
    stock: _Built,
    build: Callable[[], _Built],
    agrees: Callable[[_Built], bool],
    replaced: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> _Built:
    """Return a trusted kernel for this dtype on a CPU, else `stock`.

    `build`, `agrees` and `replaced` are as in `trusted`.
    """
    if device.type != "cpu" or not can_compile(dtype, device, replaced):
        return stock
    return trusted(build, agrees, replaced) or stock


def _agree(kernels: FusedKernels, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

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
    """Compare results for three tokens with two query heads and one KV head."""
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


@cache
def expert_choice(dtype: torch.dtype, device: torch.device) -> ChooseExperts:
    """Return the function that chooses experts by scores of this dtype on this device."""

    def build() -> ChooseExperts:
        from engine.kernels.cpu.experts import choose_experts as by_kernel

        return by_kernel

    return compiled_for_cpu(
        choose_experts, build, _choices_agree, "choices of experts", dtype=dtype, device=device
    )


@cache
def swiglu_of_chosen(dtype: torch.dtype, device: torch.device) -> GateChosen:
    """Return the SiLU gating of a layer's chosen experts for this dtype and device."""

    def build() -> GateChosen:
        from engine.kernels.cpu.experts import swiglu_of_chosen as by_kernel

        return by_kernel

    return compiled_for_cpu(
        gating(swiglu), build, _gates_agree, "gates of chosen experts", dtype=dtype, device=device
    )


def has_experts_kernel(hidden: int, inner: int) -> bool:
    """Return whether one kernel supports all experts of this shape; it need not be compiled yet.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    from engine.kernels.cpu.pair_product import BLOCK, product
    from engine.kernels.cpu.products import product_kernel

    kernel = product_kernel()
    is_by_pairs = kernel is not None and kernel.compute is product
    return is_by_pairs and not hidden % BLOCK and not inner % BLOCK


def experts_kernel(hidden: int, inner: int) -> MakeExperts | None:
    """Return the constructor of a layer's experts, if one kernel computes them."""
    return _experts_of(hidden, inner) if has_experts_kernel(hidden, inner) else None


@cache
def _experts_of(hidden: int, inner: int) -> MakeExperts | None:
    """Compare the kernel on random experts."""
    from engine.kernels.cpu.chosen_experts import ChosenExperts

    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    number, per_token, tokens = _PROBED_EXPERTS
    experts = [
        (some(2 * inner, hidden) * hidden**-0.5, some(hidden, inner) * inner**-0.5)
        for _ in range(number)
    ]

    def agrees(made: ChosenExperts) -> bool:
        x, scores = some(tokens, hidden), some(tokens, number)
        weights, chosen = scores.float().softmax(-1).topk(per_token)
        return is_close(made(x, chosen, weights), weighted_experts(x, chosen, weights, experts))

    make = partial(ChosenExperts, hidden, inner)
    name = f"experts of [{hidden}, {inner}]"
    return make if trusted(lambda: make(experts), agrees, name) is not None else None


def has_product_kernel() -> bool:
    """Return whether this package has a bfloat16 product kernel for this processor.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    return product_block() > 0


def product_block() -> int:
    """Return the number of outputs per block of the product kernel; 0 without one.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    from engine.kernels.cpu.products import product_kernel

    kernel = product_kernel()
    return 0 if kernel is None else kernel.block


def product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> ProductWithAddends | None:
    """Return a kernel product with oneDNN's packed [outputs, inputs], or None.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    from engine.kernels.cpu.products import compiled_product

    return compiled_product(packed, weight, bias)


def has_patch_attention(head_dim: int) -> bool:
    """Return whether one CPU kernel supports prompts and decodes, each token separately.

    Raises:
        ImportError: no kernel compiler is installed.
    """
    from engine.kernels.cpu import patch_attention
    from engine.kernels.cpu.avx512 import has_pairs

    return has_pairs() and not float32_is_faster() and patch_attention.fits(head_dim)


def _choices_agree(choose: ChooseExperts) -> bool:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 12, generator=generator).bfloat16()[:, :10]
    for normalize in (False, True):
        (experts, weights), (others, expected) = (
            function(scores, 3, normalize=normalize) for function in (choose, choose_experts)
        )
        if not torch.equal(experts, others) or not is_close(weights, expected):
            return False
    return True


def _gates_agree(gate: GateChosen) -> bool:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 4, 20, generator=generator).bfloat16()
    chosen, weights = torch.tensor([[0, 3], [2, 1], [3, 0]]), torch.rand(3, 2, generator=generator)
    return is_close(gate(gate_up, chosen, weights), gating(swiglu)(gate_up, chosen, weights))
