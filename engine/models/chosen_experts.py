"""Experts in bfloat16 that a kernel computes on a CPU, each for the tokens that chose it."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from engine.models.kernels.choice import is_close, trusted
from engine.models.moe import Expert, Experts, GroupedExperts
from engine.models.products.dense import DenseLinear

_PROBED_EXPERTS, _PROBED_CHOICES, _PROBED_TOKENS = 4, 2, 60


class ChosenExperts:
    """A layer's experts, gated by silu, in one call; a row's result depends on that row alone."""

    def __init__(self, hidden: int, inner: int, experts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Lay out anew of one expert after the other [2 * inner, hidden] and [hidden, inner]."""
        from engine.models.kernels import chosen_experts  # imports Numba

        self._kernel = chosen_experts
        self._hidden, self._inner = hidden, inner
        self._weights = [(_packed(gate_up, parts=2), _packed(down)) for gate_up, down in experts]
        addresses = [[each.data_ptr() for each in expert] for expert in self._weights]
        self._addresses = torch.tensor(addresses).T.contiguous()

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        tokens, wanted = chosen.shape
        out = torch.empty_like(x)
        if not tokens:
            return out
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        experts, threads = self._addresses.shape[1], torch.get_num_threads()
        num_bytes, blocks = self._kernel.own_memory(tokens, wanted, self._hidden, experts)
        own = torch.empty(threads * num_bytes, dtype=torch.uint8)
        between = torch.empty(tokens * wanted, self._inner, dtype=x.dtype)
        self._kernel.compute(
            threads,
            x.data_ptr(),
            *(each.data_ptr() for each in self._addresses),
            chosen.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            between.data_ptr(),
            own.data_ptr(),
            tokens,
            wanted,
            self._hidden,
            self._inner,
            experts,
            num_bytes,
            blocks,
        )
        return out


def can_compute_chosen(hidden: int, inner: int) -> bool:
    """Whether a kernel computes experts of this shape on this processor, as stock operators do."""
    return has_chosen_kernel(hidden, inner) and _agrees(hidden, inner)


def has_chosen_kernel(hidden: int, inner: int) -> bool:
    """Whether there is one for them, which may not have been compiled yet."""
    from engine.models.kernels.pair_product import BLOCK, product  # imports Numba
    from engine.models.products.compiled import product_kernel

    kernel = product_kernel()
    is_by_pairs = kernel is not None and kernel.compute is product
    return is_by_pairs and not hidden % BLOCK and not inner % BLOCK


@cache
def _agrees(hidden: int, inner: int) -> bool:
    """Whether the kernel computes what stock products do, by random experts of this shape."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    experts = [
        (some(2 * inner, hidden) * hidden**-0.5, some(hidden, inner) * inner**-0.5)
        for _ in range(_PROBED_EXPERTS)
    ]

    def agrees(made: Experts) -> bool:
        x, scores = some(_PROBED_TOKENS, hidden), some(_PROBED_TOKENS, _PROBED_EXPERTS)
        weights, chosen = scores.float().softmax(-1).topk(_PROBED_CHOICES)
        stock = GroupedExperts(
            [Expert(DenseLinear(up, None), DenseLinear(down, None)) for up, down in experts]
        )
        return is_close(made(x, chosen, weights), stock(x, chosen, weights))

    name = f"experts of [{hidden}, {inner}]"
    return trusted(lambda: ChosenExperts(hidden, inner, experts), agrees, name) is not None


def _packed(weight: Tensor, parts: int = 1) -> Tensor:
    """Lay out parts [outputs, inputs], one below the other, as the kernel reads them.

    Returns:
        [outputs / BLOCK, parts, inputs / 2, BLOCK, 2]
    """
    from engine.models.kernels.pair_product import BLOCK  # imports Numba

    inputs = weight.shape[1]
    return weight.view(parts, -1, BLOCK, inputs // 2, 2).permute(1, 0, 3, 2, 4).contiguous()
