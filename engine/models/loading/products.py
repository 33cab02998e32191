"""Builds products from a checkpoint's matrices: fused, packed, with adapters, or row by row.

Each tensor is copied from the mapped file into its fused weight, and each fused weight is packed
and dropped before the next is created, so memory stays near the model's own size.
"""

from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import registry
from engine.models.adapters import AdapterBank
from engine.models.formats.checkpoint import Checkpoint
from engine.models.module import Rows
from engine.models.products.dense import prepare_linear
from engine.models.products.int4 import Int4Linear, Int4Weights, fits_int4, joined, quantized
from engine.models.products.int8 import prepare_int8
from engine.models.products.invariant import InvariantLinear
from engine.models.products.mxfp4 import Mxfp4Linear, Mxfp4Weights
from engine.models.products.row_blocks import RowBlocks, is_row_independent, probe_rows

_Function = TypeVar("_Function", bound=Rows)

Quantization = Literal["int8", "int4", "stored"]
"""Quantization of weights at load; stored: none, but weights stored in 4 bits stay so."""


class ProductLoader:
    """Reads tensors onto one device and builds the configured products from them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantization: Quantization | None,
        is_row_independent: bool,
        bank: AdapterBank | None,
        by_kernels: bool = False,
    ) -> None:
        """Read from this process's part of a checkpoint.

        Args:
            dtype: of weights and activations.
            is_row_independent: whether rows must not depend on others (see `row_blocks`).
            bank: adapters used by the products, if the model is served with any.
            by_kernels: whether kernels of `engine.kernels` compute products where available.
        """
        self.checkpoint = checkpoint
        self.device = device
        self.bank = bank
        self.dtype = dtype
        self._quantization = quantization
        self.is_row_independent = is_row_independent
        self._by_kernels = by_kernels

    def adapted(self, product: Rows, names: list[str], widths: list[int], inputs: int) -> Rows:
        """Return a product of rows [rows, inputs], with adapters if enabled.

        Args:
            names: modules that make up its outputs.
            widths: local outputs of each module.
        """
        product = self.by_rows(product, inputs)
        if self.bank is None:
            return product
        return self.bank.adapted(product, names, widths, inputs=inputs)

    def by_rows(
        self, function: _Function, width: int, dtype: torch.dtype | None = None
    ) -> _Function | RowBlocks:
        """Return a function of rows [rows, width] that computes each row separately if required.

        `dtype` is that of the rows; default: activations. On CUDA no wrapper is needed: products
        are row-wise, and other operations treat values or rows separately.
        """
        if (
            not self.is_row_independent
            or self.device.type == "cuda"
            or is_row_independent(function)
        ):
            return function
        return RowBlocks(function, probe_rows(width, dtype or self.dtype))

    @property
    def is_plain(self) -> bool:
        """Whether products are neither quantized nor adapted."""
        return self._quantization is None and self.bank is None

    @property
    def by_kernels(self) -> bool:
        """Whether `engine.kernels` computes plain products, each row separately."""
        is_asked = self.device.type == "cpu" and self.is_plain and self._by_kernels
        return is_asked and registry.has_product_kernel()

    @property
    def splits_experts(self) -> bool:
        """Whether experts and router are each made row-wise, not the sparse block as a whole.

        Kernels are row-wise, and float32 products support almost any number of rows.
        """
        in_parts = self.by_kernels or (self.is_plain and self.dtype == torch.float32)
        return self.is_row_independent and in_parts

    def linear(self, *names: str, bias: list[str] | None = None) -> Rows:
        """Return the product with some weights concatenated by outputs, plus their biases."""
        added = self.fused(bias) if bias else None
        if self._quantization != "int8":
            packed = self._stored_mxfp4(list(names))
            if packed is not None:
                return Mxfp4Linear(packed, added, self.dtype)
        if self._quantization not in ("int4", "stored"):
            return self.prepare(self.fused(list(names)), added)
        weights = self._stored_int4(list(names))
        if weights is None:
            whole = self.fused(list(names))
            weights = quantized(whole) if self._quantization == "int4" else None
            if weights is None or not fits_int4(weights):
                return self.prepare(whole, added)
        return Int4Linear(weights, added, self.dtype)

    def _stored_int4(self, names: list[str]) -> Int4Weights | None:
        """Return concatenated weights, if all are stored in a supported 4-bit format."""
        stored = [self.checkpoint.int4(name) for name in names]
        known = [weights for weights in stored if weights is not None]
        whole = joined(known) if len(known) == len(names) else None
        return whole if whole is not None and fits_int4(whole) else None

    def _stored_mxfp4(self, names: list[str]) -> Mxfp4Weights | None:
        """Return concatenated weights, if all are stored in blocks of 4-bit floats."""
        stored = [self.checkpoint.mxfp4(name) for name in names]
        parts = [weights for weights in stored if weights is not None]
        if len(parts) < len(names):
            return None
        return Mxfp4Weights(*(torch.cat(each).to(self.device) for each in zip(*parts, strict=True)))

    def prepare(self, weight: Tensor, bias: Tensor | None) -> Rows:
        """Return the product with a weight [outputs, inputs], quantized to 8 bits if configured."""
        if self._quantization == "int8":
            return prepare_int8(weight, bias)
        if self.is_row_independent and weight.device.type == "cuda":
            return InvariantLinear(weight, bias)
        return self.plain(weight, bias)

    def plain(self, weight: Tensor, bias: Tensor | None) -> Rows:
        """Return the product with an unquantized weight."""
        return prepare_linear(
            weight, bias, by_rows=self.is_row_independent, by_kernels=self._by_kernels
        )

    def whole_blocks(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Pad the outputs with zeros to whole blocks, which kernels require."""
        missing = -len(weight) % registry.product_block()
        filled = F.pad(weight, (0, 0, 0, missing))
        return filled, None if bias is None else F.pad(bias, (0, missing))

    def fused(self, names: list[str]) -> Tensor:
        """Return a new tensor of the tensors concatenated along the first axis."""
        parts = [self.checkpoint.tensor(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        fused = torch.empty(rows, *parts[0].shape[1:], dtype=self.dtype, device=self.device)
        first = 0
        for part in parts:
            fused[first : first + part.shape[0]].copy_(part)
            first += part.shape[0]
        return fused

    def copy(self, name: str) -> Tensor:
        """Return a copy of a tensor."""
        return self.fused([name])
