"""Mixture-of-experts layers: a router and the experts it selects."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.reference import (
    ChooseExperts,
    Experts,
    GateChosen,
    choose_experts,
    gating,
    swiglu,
)
from engine.models.adapters import AdapterBank
from engine.models.layers import sigmoid
from engine.models.module import Module, Rows, add_to
from engine.models.products.dense import DenseLinear
from engine.models.products.row_blocks import is_row_independent
from engine.models.spec import MoeSpec

_SMALLEST_SUM = 1e-20
_FEW_TOKENS = 64


class Router(Module):
    """Chooses experts per token by the softmax of a linear score."""

    def __init__(
        self,
        score: Rows,
        num_experts: int,
        experts_per_token: int,
        *,
        normalize: bool,
        choose: ChooseExperts = choose_experts,
    ) -> None:
        """Initialize from a product whose first outputs are the scores, and their selection."""
        super().__init__()
        self.score = score
        self._num_experts = num_experts
        self._count = experts_per_token
        self._choose = partial(choose, per_token=experts_per_token, normalize=normalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights for x [tokens, hidden].

        Returns:
            experts: [tokens, experts_per_token] int64
            weights: the same shape, float32
        """
        if not x.shape[0]:
            nothing = x.new_empty(0, self._count, dtype=torch.float32)
            return nothing.long(), nothing
        return self._choose(self.score(x)[:, : self._num_experts])


class GroupRouter(Module):
    """Chooses experts within the best groups; corrections of the scores affect only the choice."""

    correction: Tensor | None

    def __init__(self, score: Rows, correction: Tensor | None, moe: MoeSpec) -> None:
        """Initialize from the product, and corrections [experts] in float32."""
        super().__init__()
        self.score = score
        self.register_buffer("correction", correction)
        self._moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, as `Router` does."""
        moe = self._moe
        if not x.shape[0]:
            nothing = x.new_empty(0, moe.experts_per_token, dtype=torch.float32)
            return nothing.long(), nothing
        found = self.score(x).float()
        scores = found.softmax(dim=-1) if moe.scoring == "softmax" else sigmoid(found)
        ranked = scores if self.correction is None else scores + self.correction
        if self.correction is None and moe.scoring == "sigmoid" and moe.num_groups == 1:
            ranked = found  # large scores have equal sigmoids
        experts = self._allowed(ranked).topk(moe.experts_per_token).indices
        weights = scores.gather(1, experts)
        if moe.normalize_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        return experts, weights * moe.weights_scale

    def _allowed(self, scores: Tensor) -> Tensor:
        """Return scores with those of unselected groups set to minus infinity."""
        moe = self._moe
        if moe.groups_per_token == moe.num_groups:
            return scores
        grouped = scores.view(len(scores), moe.num_groups, -1)
        best = grouped.topk(moe.best_of_group).values.sum(-1)
        chosen = best.topk(moe.groups_per_token).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


class Expert(Module):
    """One expert: a gated MLP."""

    def __init__(self, gate_up: Rows, down: Rows, gated: Rows = swiglu) -> None:
        """Initialize from the products and the gated activation."""
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self._gated = gated
        self.is_row_independent = all(is_row_independent(part) for part in (gate_up, down, gated))
        self.kernel: tuple[Any, ...] | None = None
        first, second = (getattr(part, "kernel", None) for part in (gate_up, down))
        if first is not None and second is not None:
            self.kernel = (first, second, gated, first[-1] + second[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, hidden] to the same shape."""
        return self.down_proj(self._gated(self.gate_up_proj(x)))

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the expert's output to `sums`, fused with the last product if supported."""
        return add_to(sums, self.down_proj, self._gated(self.gate_up_proj(x)))


class GroupedExperts(nn.ModuleList):
    """Experts with separate weights, each in its fastest layout."""

    def __init__(self, experts: Iterable[nn.Module], adapters: AdapterBank | None = None) -> None:
        super().__init__(experts)
        self._adapters = adapters

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        return _expert_by_expert(x, chosen, weights, list(self), self._adapters)


class KernelExperts(Module):
    """Experts computed by one kernel."""

    def __init__(self, experts: Experts, weights: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Initialize from the kernel, and each expert's weights in the kernel's layout."""
        super().__init__()
        self._experts = experts
        for number, (gate_up, down) in enumerate(weights):
            self.register_buffer(f"gate_up_{number}", gate_up)
            self.register_buffer(f"down_{number}", down)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        return self._experts(x, chosen, weights)

    def extra_repr(self) -> str:
        """Return the number of experts."""
        return f"{len(self._buffers) // 2} experts"


class AllExperts(Module):
    """Two products with all experts, for any number of tokens.

    Experts that a token has not chosen get weight zero. Tokens are computed separately if both
    products do so.
    """

    def __init__(self, gate_up: Rows, down: Rows, num_experts: int, gate: GateChosen) -> None:
        """Initialize from products: hidden to experts * 2 * inner, experts * inner to hidden."""
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self._num_experts = num_experts
        self._gate = gate

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        gate_up = self.gate_up_proj(x).view(len(x), self._num_experts, -1)
        return self.down_proj(self._gate(gate_up, chosen, weights))


class StackedExperts(Module):
    """Small experts in two matrices, so that few tokens are computed in two products.

    For few tokens of a small model, calls cost more than arithmetic: all experts run on all tokens,
    and those that were not chosen get weight zero.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, gated: Rows = swiglu) -> None:
        """Initialize with gate_up [experts, 2 * inner, hidden], down [experts, inner, hidden]."""
        super().__init__()
        self.together = AllExperts(
            DenseLinear(gate_up.flatten(0, 1), None),
            DenseLinear(down.flatten(0, 1).T, None),
            len(gate_up),
            gating(gated),
        )
        self._experts = [
            Expert(DenseLinear(up, None), DenseLinear(back.T, None), gated)
            for up, back in zip(gate_up, down, strict=True)
        ]
        """Views of the same weights."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, as `Experts` does."""
        if len(x) > _FEW_TOKENS:
            return _expert_by_expert(x, chosen, weights, self._experts)
        out: Tensor = self.together(x, chosen, weights)
        return out


def _expert_by_expert(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Sequence[Rows],
    adapters: AdapterBank | None = None,
) -> Tensor:
    rows = torch.arange(len(x), device=x.device).repeat_interleave(chosen.shape[1])
    by_choice = run_experts(x, rows, chosen.flatten(), experts, adapters)
    return weighted_sum(by_choice, weights).to(x.dtype)


def run_experts(
    x: Tensor,
    rows: Tensor,
    chosen: Tensor,
    experts: Sequence[Rows],
    adapters: AdapterBank | None = None,
) -> Tensor:
    """Gather tokens by expert; return each pair's expert output.

    Each chosen expert runs once over all of its tokens; the others cost nothing.

    Args:
        x: [tokens, hidden]
        rows, chosen: [pairs] the token and the expert of each pair
        adapters: has the tokens' adapters; `current` is set to each expert's rows.

    Returns:
        [pairs, hidden]
    """
    if not len(rows):
        return x.new_empty(0, x.shape[1])
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=len(experts)).tolist()
    tokens = rows.index_select(0, order)
    gathered = x.index_select(0, tokens)
    adapted = None
    if adapters is not None and adapters.adapts_experts:
        adapted = adapters.current
    outputs = []
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            here = slice(first, first + count)
            if adapters is not None and adapted is not None:
                adapters.current = adapted.select(tokens[here])
            outputs.append(expert(gathered[here]))
            first += count
    if adapters is not None and adapted is not None:
        adapters.current = adapted
    return torch.empty_like(gathered).index_copy_(0, order, torch.cat(outputs))


def weighted_sum(by_choice: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's outputs [tokens * choices, hidden], in the order of its choices."""
    weighted = by_choice.view(*weights.shape, by_choice.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(dim=1)


class SparseMlp(Module):
    """The sparse block of a layer: every token goes through its chosen experts."""

    def __init__(
        self,
        router: Router | GroupRouter,
        experts: Experts,
        shared: Rows | None = None,
        partition: Callable[[Rows, Tensor], Tensor] | None = None,
        *,
        scales_inputs: bool = False,
    ) -> None:
        """Initialize from the modules; `shared` is an MLP additionally applied to every token.

        `partition` applies a function to the tokens routed by this process, if those are not all;
        `scales_inputs` as in `MoeSpec`.
        """
        super().__init__()
        self.router = router
        self._partition = partition
        self._scales_inputs = scales_inputs
        self.experts = experts
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to the same shape."""
        out = self._routed(x) if self._partition is None else self._partition(self._routed, x)
        return out if self.shared_experts is None or not len(x) else out + self.shared_experts(x)

    def _routed(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        if self._scales_inputs:
            return self.experts(x * weights.to(x.dtype), experts, torch.ones_like(weights))
        return self.experts(x, experts, weights)
