"""Mixture-of-experts layers: a router and the experts that its choices are sent to."""

import torch
from torch import Tensor

from engine.models.layers import Linear, swiglu


class Router:
    """Chooses experts per token by the softmax of a linear score."""

    def __init__(self, score: Linear, experts_per_token: int, *, normalize: bool) -> None:
        self._score = score
        self._count = experts_per_token
        self._normalize = normalize

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights for x [tokens, hidden].

        Returns:
            experts: [tokens, experts_per_token] int64
            weights: the same shape, float32
        """
        probabilities = torch.softmax(self._score(x), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._count, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights


class Expert:
    """One expert: a gated MLP."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(swiglu(self._gate_up(x)))


class SparseMlp:
    """The sparse block of a layer: every token goes through its chosen experts only."""

    def __init__(self, router: Router, experts: list[Expert]) -> None:
        self._router = router
        self._experts = experts

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to the same shape.

        Tokens are gathered expert by expert, so that each expert that was chosen at all runs one
        product over all of its tokens and the others cost nothing.
        """
        chosen, weights = self._router(x)
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        gathered = x.index_select(0, order // per_token)
        outputs = []
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                outputs.append(expert(gathered[first : first + count]))
                first += count
        by_choice = torch.empty_like(gathered).index_copy_(0, order, torch.cat(outputs))
        by_choice = by_choice.view(*chosen.shape, -1) * weights.unsqueeze(-1)
        return by_choice.sum(dim=1).to(x.dtype)
