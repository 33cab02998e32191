"""Builds the modules of an encoder from the tensors of a checkpoint."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.encoders.tensors import Tensors
from engine.models.layers import Chain
from engine.models.module import Module, Rows, weight_of
from engine.models.products.dense import DenseLinear, gelu_product, prepare_linear
from engine.models.products.row_blocks import RowBlocks, probe_rows
from engine.models.spec import UnsupportedModel

Config = dict[str, Any]


@dataclass(eq=False)
class Builder:
    """Builds modules in one dtype on one device."""

    tensors: Tensors
    dtype: torch.dtype
    device: torch.device
    _: KW_ONLY
    batch_invariant: bool
    """Whether no row depends on the others."""

    def copy(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor."""
        stored = self.tensors.take(name, *shape)
        return stored.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def linear(self, *names: str, rows: int, width: int, bias: bool = True) -> Rows:
        """Return products with weights [rows, width], with their outputs concatenated."""
        product = self._product(*names, rows=rows, width=width, bias=bias)
        return self._by_rows(product, width, self.dtype)

    def flat(self, name: str, rows: int, *shape: int) -> Rows:
        """Return the product of a weight [rows, *shape] with flattened inputs."""
        weight = self.copy(f"{name}.weight", rows, *shape).view(rows, -1)
        return prepare_linear(weight, self.copy(f"{name}.bias", rows))

    def mlp(self, names: tuple[str, str], activation: Rows, sizes: tuple[int, int]) -> Rows:
        """Return an MLP with biases; `sizes` are outer and inner width."""
        width, inner = sizes
        weight = self.copy(f"{names[0]}.weight", inner, width)
        bias = self.copy(f"{names[0]}.bias", inner)
        outer = self._product(names[1], rows=width, width=inner)
        fused = gelu_product(weight, bias) if activation is _gelu else None
        parts = (fused, outer) if fused else (prepare_linear(weight, bias), activation, outer)
        return self._by_rows(Chain(*parts), width, self.dtype)

    def gated_mlp(
        self,
        names: tuple[tuple[str, ...], str],
        activation: Rows,
        sizes: tuple[int, int],
        *,
        bias: bool,
    ) -> Rows:
        """Return an MLP in which one half of the inner values gates the other.

        `names`: one fused product or two for the halves, and the output product.
        """
        width, inner = sizes
        rows = 2 * inner // len(names[0])
        function = Chain(
            self._product(*names[0], rows=rows, width=width, bias=bias),
            partial(gated, activation=activation),
            self._product(names[1], rows=width, width=inner, bias=bias),
        )
        # As a whole: results between the products depend on their layout.
        return self._by_rows(function, width, self.dtype)

    def _product(self, *names: str, rows: int, width: int, bias: bool = True) -> Rows:
        weight = torch.cat([self.copy(f"{name}.weight", rows, width) for name in names])
        shift = torch.cat([self.copy(f"{name}.bias", rows) for name in names]) if bias else None
        return prepare_linear(weight, shift)

    def _by_rows(self, function: Rows, width: int, dtype: torch.dtype) -> Rows:
        """Return a function that computes each row separately if required."""
        if not self.batch_invariant:
            return function
        return RowBlocks(function, probe_rows(width, dtype))

    def norm(
        self,
        name: str,
        width: int,
        eps: float,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Rows:
        """Return a layer norm."""
        weight = self.copy(f"{name}.weight", width, dtype=dtype)
        return LayerNorm(
            weight, self.copy(f"{name}.bias", width, dtype=dtype) if bias else None, eps
        )

    def head(self, name: str, *, rows: int, width: int, bias: bool = True) -> Rows:
        """Return a product in float32, for the few rows that are pooled."""
        weight = self.copy(f"{name}.weight", rows, width, dtype=torch.float32)
        shift = self.copy(f"{name}.bias", rows, dtype=torch.float32) if bias else None
        return self._by_rows(DenseLinear(weight, shift), width, torch.float32)


def activation_of(config: Config, key: str) -> Rows:
    """Return the activation named in a config.

    Raises:
        UnsupportedModel: it is unknown.
    """
    name = config.get(key) or "gelu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: {key} {name!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Rows] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu,
    "silu": F.silu,
}


def gated(x: Tensor, activation: Rows) -> Tensor:
    """Return activation(first half) * second half of each row."""
    first, second = x.chunk(2, dim=-1)
    return activation(first).mul_(second)


class LayerNorm(Module):
    """Normalizes rows to zero mean and unit variance, then applies weights and bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = weight_of(weight)
        self.bias = None if bias is None else weight_of(bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [rows, width] to the same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
