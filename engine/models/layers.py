"""Functions of rows between a decoder's products: norms, gates, caps and scales."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import rms_norm, rms_norm_heads, swiglu
from engine.kernels.registry import FusedKernels
from engine.models.spec import ModelSpec, NormSpec

Rows = Callable[[Tensor], Tensor]
"""From [rows, in] to [rows, out]."""
_VECTOR = 64
"""Values of which a processor computes a multiple in whole vectors."""


def gelu_gated(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, by the approximation with tanh, for [rows, 2 * inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED: dict[str, Rows] = {"silu": swiglu, "gelu_tanh": gelu_gated}
"""By the activation of the gates."""


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function of values, each of which depends on its own input alone.

    A CPU computes what fills no vector by another function than the rest: so vectors are filled.
    """
    flat = x.flatten()
    whole = torch.sigmoid(F.pad(flat, (0, -len(flat) % _VECTOR)))
    return whole[: len(flat)].view(x.shape)


def clamped_swiglu(gate_up: Tensor, *, limit: float, slope: float) -> Tensor:
    """Return gate * sigmoid(slope * gate) * (up + 1) for [rows, 2 * inner], within a limit."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(slope * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


def gated(spec: ModelSpec, kernels: FusedKernels | None = None) -> Rows:
    """Return what a model's MLPs make [rows, inner] with, of [rows, 2 * inner]."""
    if spec.clamp is None:
        if kernels is not None and GATED[spec.activation] is swiglu:
            return kernels.swiglu
        return GATED[spec.activation]
    return partial(clamped_swiglu, limit=spec.clamp.limit, slope=spec.clamp.slope)


def prepare_norm(norm: NormSpec, weight: Tensor, kernels: FusedKernels | None = None) -> Rows:
    """Return the norm of rows [rows, width]; `weight` is [width], as stored."""
    if norm.kind == "layer":
        return partial(layer_norm, weight=weight, eps=norm.eps)
    if kernels is not None:
        exact = weight.float() + 1 if norm.adds_one else weight.float()
        return partial(kernels.rms_norm, weight=exact, eps=norm.eps)
    if norm.adds_one:
        return partial(rms_norm_exact, weight=weight.float() + 1, eps=norm.eps)
    return partial(rms_norm, weight=weight, eps=norm.eps)


def layer_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Shift each row to a mean of zero and scale it to a variance of one, then by the weights."""
    return F.layer_norm(x, (x.shape[-1],), weight, None, eps)


def rms_norm_exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do as `rms_norm` with weights in float32, and round once."""
    return rms_norm(x.float(), weight, eps).to(x.dtype)


def prepare_qk_norm(
    spec: ModelSpec, query: Tensor, key: Tensor, kernels: FusedKernels | None = None
) -> Rows:
    """Return what normalizes queries and keys [tokens, heads + kv_heads, head_dim].

    It may do so in place.

    Args:
        query, key: weights as stored, of the shapes in `engine.models.weights`.
    """
    norm, heads, kv_heads = spec.norm, spec.num_heads, spec.num_kv_heads
    if norm.adds_one:
        query, key = query.float() + 1, key.float() + 1
    if spec.qk_norm == "width":
        return partial(_rms_norm_widths, weights=(query, key), heads=heads, eps=norm.eps)
    weight = torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1)))
    if norm.kind == "layer":
        return partial(_layer_norm_heads, weight=weight, eps=norm.eps)
    if kernels is not None:
        return partial(kernels.rms_norm_heads, weight=weight.float(), eps=norm.eps)
    return partial(
        _rms_norm_heads_exact if norm.adds_one else rms_norm_heads, weight=weight, eps=norm.eps
    )


def unit_norm(heads: Tensor, eps: float) -> Tensor:
    """Scale every head by itself to a root mean square of one."""
    return F.rms_norm(heads, (heads.shape[-1],), None, eps)


def _rms_norm_heads_exact(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_heads(heads.float(), weight, eps).to(heads.dtype)


def _layer_norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layer_norm(heads, None, eps).mul_(weight)


def _rms_norm_widths(
    rows: Tensor, weights: tuple[Tensor, Tensor], heads: int, eps: float
) -> Tensor:
    """Normalize all queries of a token together, and all its keys."""
    parts = rows[:, :heads].flatten(1), rows[:, heads:].flatten(1)
    normed = [rms_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True)]
    return torch.cat(normed, dim=1).view(rows.shape)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Bend values smoothly into (-cap, cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


class Chain:
    """Functions of rows, one after the other."""

    __slots__ = ("_functions",)

    def __init__(self, *functions: Rows) -> None:
        self._functions = functions

    def __call__(self, x: Tensor) -> Tensor:
        for function in self._functions:
            x = function(x)
        return x


def scaled(function: Rows, scale: float) -> Rows:
    """Return the function whose results are multiplied by `scale`, in the type that they have."""
    return function if scale == 1.0 else Chain(function, partial(_scale, factor=scale))


def _scale(x: Tensor, factor: float) -> Tensor:
    return x.mul_(factor)
