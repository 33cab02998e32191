"""Row-wise functions between a decoder's products: norms, gates, caps and scales."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.reference import rms_norm, rms_norm_heads, swiglu
from engine.kernels.registry import FusedKernels
from engine.models.module import Module, Rows, weight_of
from engine.models.spec import ModelSpec, NormSpec

_VECTOR = 64
"""torch's CPU kernels process whole vectors of this many values."""


def gelu_gated(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh approximation, for [rows, 2 * inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED: dict[str, Rows] = {"silu": swiglu, "gelu_tanh": gelu_gated}
"""Gated activations by name."""


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid; each result depends only on its own input.

    torch's CPU kernel computes a partial vector with another function, so the input is padded to
    whole vectors.
    """
    flat = x.flatten()
    whole = torch.sigmoid(F.pad(flat, (0, -len(flat) % _VECTOR)))
    return whole[: len(flat)].view(x.shape)


def clamped_swiglu(gate_up: Tensor, *, limit: float, slope: float) -> Tensor:
    """Return gate * sigmoid(slope * gate) * (up + 1) for [rows, 2 * inner], clamped to a limit."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(slope * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


def gated(spec: ModelSpec, kernels: FusedKernels | None = None) -> Rows:
    """Return a model's gated activation, [rows, 2 * inner] to [rows, inner]."""
    if spec.clamp is None:
        if kernels is not None and GATED[spec.activation] is swiglu:
            return kernels.swiglu
        return GATED[spec.activation]
    return partial(clamped_swiglu, limit=spec.clamp.limit, slope=spec.clamp.slope)


class Norm(Module):
    """A norm of rows, or of heads."""

    def __init__(
        self, compute: Callable[[Tensor, Tensor, float], Tensor], weight: Tensor, eps: float
    ) -> None:
        """Initialize from the norm function, its weight and the epsilon."""
        super().__init__()
        self.weight = weight_of(weight)
        self.eps = eps
        self._compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [rows, width] or [tokens, heads, head_dim], possibly in place."""
        return self._compute(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the norm function's name with the parameters."""
        return f"{self._compute.__name__}, eps={self.eps}, {super().extra_repr()}"


def prepare_norm(norm: NormSpec, weight: Tensor, kernels: FusedKernels | None = None) -> Norm:
    """Return the norm of rows [rows, width]; `weight` is [width], as stored."""
    if norm.kind == "layer":
        return Norm(layer_norm, weight, norm.eps)
    if kernels is not None:
        exact = weight.float() + 1 if norm.adds_one else weight.float()
        return Norm(kernels.rms_norm, exact, norm.eps)
    if norm.adds_one:
        return Norm(rms_norm_exact, weight.float() + 1, norm.eps)
    return Norm(rms_norm, weight, norm.eps)


def layer_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize each row to zero mean and unit variance, then scale by the weights."""
    return F.layer_norm(x, (x.shape[-1],), weight, None, eps)


def rms_norm_exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` in float32, rounding once."""
    return rms_norm(x.float(), weight, eps).to(x.dtype)


def prepare_qk_norm(
    spec: ModelSpec, query: Tensor, key: Tensor, kernels: FusedKernels | None = None
) -> Rows:
    """Return the norm of queries and keys [tokens, heads + kv_heads, head_dim].

    It may work in place.

    Args:
        query, key: weights as stored, of the shapes in `engine.models.weights`.
    """
    norm, heads, kv_heads = spec.norm, spec.num_heads, spec.num_kv_heads
    if norm.adds_one:
        query, key = query.float() + 1, key.float() + 1
    if spec.qk_norm == "width":
        return WidthNorm(query, key, heads, norm.eps)
    weight = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
    if norm.kind == "layer":
        return Norm(_layer_norm_heads, weight, norm.eps)
    if kernels is not None:
        return Norm(kernels.rms_norm_heads, weight.float(), norm.eps)
    return Norm(_rms_norm_heads_exact if norm.adds_one else rms_norm_heads, weight, norm.eps)


def unit_norm(heads: Tensor, eps: float) -> Tensor:
    """Scale every head to a root mean square of one."""
    return F.rms_norm(heads, (heads.shape[-1],), None, eps)


def _rms_norm_heads_exact(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_heads(heads.float(), weight, eps).to(heads.dtype)


def _layer_norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layer_norm(heads, None, eps).mul_(weight)


class WidthNorm(Module):
    """A norm over all queries of a token together, and over all its keys."""

    def __init__(self, query: Tensor, key: Tensor, heads: int, eps: float) -> None:
        """Initialize from the query weights [heads * head_dim], `heads`, and the key weights."""
        super().__init__()
        self.query = weight_of(query)
        self.key = weight_of(key)
        self._heads = heads
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize [tokens, heads + kv_heads, head_dim]."""
        queries, keys = rows[:, : self._heads].flatten(1), rows[:, self._heads :].flatten(1)
        normed = rms_norm(queries, self.query, self.eps), rms_norm(keys, self.key, self.eps)
        return torch.cat(normed, dim=1).view(rows.shape)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Cap values smoothly to (-cap, cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


class Embedding(Module):
    """A table of embeddings."""

    def __init__(self, weight: Tensor) -> None:
        """Initialize from a table [tokens, hidden]."""
        super().__init__()
        self.weight = weight_of(weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] for token ids [tokens]."""
        return torch.embedding(self.weight, token_ids)


class Chain(Module):
    """A sequence of row-wise functions; torch's `Sequential` takes only modules."""

    def __init__(self, *functions: Rows) -> None:
        super().__init__()
        self._functions = functions
        for index, function in enumerate(functions):
            if isinstance(function, nn.Module):
                self.add_module(str(index), function)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        for function in self._functions:
            x = function(x)
        return x


def scaled(function: Rows, scale: float) -> Rows:
    """Return the function with its results multiplied by `scale`, in their dtype."""
    return function if scale == 1.0 else Chain(function, partial(_scale, factor=scale))


def _scale(x: Tensor, factor: float) -> Tensor:
    return x.mul_(factor)
