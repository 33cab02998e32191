"""Reference implementations of the kernels with torch's operators, and their fallbacks.

Each kernel is compared with these before a model uses it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CACHED_VALUES = 1 << 16
"""Values normalized at once per CPU thread: in float32 they and their squares take 512 KiB, so that
all passes but the first find them in the cache."""
_UNCACHED_VALUES = 1 << 18
"""Minimum values per thread for which this pays."""


def row_independent(function: _Function) -> _Function:
    """Mark a function as computing each row independently of the number of rows."""
    function.is_row_independent = True  # type: ignore[attr-defined]
    return function


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to a root mean square of one, then by the weights (computed in float32)."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if x.dtype != torch.float32:
        return _rms_norm_16(x, weight, eps)
    # Half as many operations as torch's composition take half of its time: see
    # benchmarks/results/measurements.md
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, weight).mul_(scale)


def _rms_norm_16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` on a CPU with 16-bit values.

    Many rows are processed some at a time with the operations of torch's own composition, which
    makes ten passes over all of them. Each row gets the same bits.
    """
    threads, width = torch.get_num_threads(), x.shape[-1]
    if x.numel() < _UNCACHED_VALUES * threads:
        return F.rms_norm(x, (width,), weight, eps)
    at_once = max(1, _CACHED_VALUES * threads // width)
    out = torch.empty_like(x)
    for some, normed in zip(torch.split(x, at_once), torch.split(out, at_once), strict=True):
        values = some.float()
        scale = values.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        normed.copy_(values.mul_(scale).mul_(weight))
    return out


def rms_norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize every head separately.

    Args:
        heads: [tokens, heads, head_dim]
        weight: [heads, head_dim]
    """
    return F.rms_norm(heads, (heads.shape[-1],), None, eps).mul_(weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for [rows, 2 * inner] with the gates in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of every head by its position's angle.

    Args:
        heads: [tokens, heads, head_dim]
        cos, sin: [tokens, 1, head_dim] from `rotation`
        out: tensor for the result, possibly `heads`; default: a new one
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin, out=out)


class ChooseExperts(Protocol):
    """See `choose_experts`."""

    def __call__(self, scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights."""
        ...


def choose_experts(scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the most likely experts of each token by the softmax of scores [tokens, experts].

    Args:
        normalize: whether the weights of a token's experts are scaled to sum to one.

    Returns:
        experts: [tokens, per_token] int64
        weights: the same shape, float32
    """
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights, experts = probabilities.topk(per_token, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts, weights


GateChosen = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Applies the gates and the experts' weights, zero for experts that a token has not chosen.

Maps [tokens, experts, 2 * inner], with chosen experts and weights [tokens, experts_per_token] from
`Router`, to [tokens, experts * inner].
"""


def gating(gated: Callable[[Tensor], Tensor]) -> GateChosen:
    """Return a function that applies all experts' gates, then their weights."""

    def gate(gate_up: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        shares = gate_up.new_zeros(gate_up.shape[:2])
        shares.scatter_(1, chosen, weights.to(gate_up.dtype))
        return gated(gate_up).mul_(shares.unsqueeze(-1)).flatten(1)

    return gate


class Experts(Protocol):
    """All experts of one layer."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, /) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: [tokens, hidden]
            chosen, weights: [tokens, experts_per_token], from `choose_experts`
        """
        ...


def weighted_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the weighted sum of each token's SiLU-gated experts.

    Args:
        x: [tokens, hidden]
        chosen, weights: [tokens, experts_per_token], from `choose_experts`
        experts: [2 * inner, hidden] and [hidden, inner] of each
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for number, (gate_up, down) in enumerate(experts):
        tokens, places = torch.nonzero(chosen == number, as_tuple=True)
        made = F.linear(swiglu(F.linear(x[tokens], gate_up)), down)
        out.index_add_(0, tokens, made * weights[tokens, places].unsqueeze(-1))
    return out.to(x.dtype)
