"""Matrix products, with weights in the fastest layout."""

import logging
import sys
from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import registry
from engine.kernels.processor import (
    ALL_ROWS,
    float32_is_faster,
    has_matrix_unit,
    product_rows,
)
from engine.models.module import Module, Rows, weight_of
from engine.models.products.blocked import BlockedLinear, fits_blocks
from engine.models.products.converted import ConvertedLinear, is_worth_converting
from engine.models.products.row_padding import pad_rows

logger = logging.getLogger(__name__)

_PACKED_ROWS = 16
"""Row count that the packed layout is optimized for; measured to serve 1 to 512 rows well."""
_CONVERTED_ROWS = 192
"""Minimum rows for which converting 16-bit weights pays, where float32 is faster."""
_MAX_CONVERTED = 1 << 26
"""Maximum weights converted at once, which bounds the memory (256 MB)."""
_UNPACKED_WEIGHTS = 1 << 18
"""Maximum weights for which float32 products are faster from the plain layout."""
_ADDING_WEIGHTS = 1 << 19
"""Minimum weights for which the product and addition are fused. Smaller ones gain little, and
fused, as without a matrix unit, a row's bits depend more on the number of rows."""


class DenseLinear(Module):
    """Weights as stored, [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.kernel = _kernel("dense", weight, bias)
        self.weight = weight_of(weight)
        self.bias = None if bias is None else weight_of(bias)
        # oneDNN compiles a CPU's 16-bit product for each shape.
        self._is_compiled = weight.device.type == "cpu" and weight.dtype.itemsize == 2

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if not self._is_compiled:
            return F.linear(x, self.weight, self.bias)
        return F.linear(pad_rows(x, self.weight.numel()), self.weight, self.bias)[: x.shape[0]]

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the product to `sums`; on a device in one operation, before rounding."""
        if x.device.type == "cpu" or self.bias is not None:
            return sums.add_(self.forward(x))
        return sums.addmm_(x, self.weight.T)


class PackedLinear(Module):
    """Weights in oneDNN's blocked layout, which avoids a reorder at every call."""

    weight: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, float32_rows: int = sys.maxsize
    ) -> None:
        """Pack a dense [out, in] weight; the caller drops the original.

        Products of at least `float32_rows` rows are computed in float32.

        Raises:
            RuntimeError: this processor cannot pack this dtype.
        """
        super().__init__()
        self.is_row_independent = False
        self._compiled: registry.ProductWithAddends | None = None
        self._compiled_rows = 0
        self.kernel = _kernel("packed", weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self.register_buffer("weight", packed)
        self._num_weights = weight.numel()
        self.bias = None if bias is None else weight_of(bias)
        self._float32_rows = float32_rows
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary
        self._adds = (
            weight.dtype.itemsize == 2 and weight.numel() >= _ADDING_WEIGHTS and has_matrix_unit()
        )

    def use_kernel(self, weight: Tensor, *, by_rows: bool) -> None:
        """Use a kernel of `engine.kernels` for the row counts at which it is faster.

        With `by_rows` it is used for any row count, since it computes each row separately.

        `weight` is the original, unpacked weight. If the kernel cannot be compiled or disagrees,
        nothing changes; the log says so.
        """
        self._compiled = registry.product(self.weight, weight, self.bias)
        if self._compiled is not None:
            self._compiled_rows = ALL_ROWS if by_rows else product_rows()
            self.is_row_independent = self._compiled_rows == ALL_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if self._compiled is not None and x.shape[0] <= self._compiled_rows:
            return self._compiled(x)
        if x.shape[0] >= self._float32_rows:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.to_dense(torch.float32), bias).to(x.dtype)
        rows = pad_rows(x, self._num_weights)
        product: Tensor = self._product(rows, self.weight, self.bias, "none", [], "")
        return product[: x.shape[0]]

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the product before it is rounded, where a fused operation exists."""
        rows = x.shape[0]
        if self._compiled is not None and rows <= self._compiled_rows:
            return self._compiled(x, sums)
        if not self._adds or rows >= self._float32_rows:
            return sums.add_(self.forward(x))
        x, sums = pad_rows(x, self._num_weights), pad_rows(sums, self._num_weights)
        result: Tensor = self._product_and_sum(x, sums, self.weight, self.bias, "add")
        return result[:rows]


def _kernel(name: str, weight: Tensor, bias: Tensor | None) -> tuple[Hashable, ...]:
    """Return what determines a product's summation order: see `products.row_blocks`."""
    layout = (weight.dtype, weight.shape, weight.stride(), bias is None)
    return (name, *layout, weight.numel())


def _float32_rows(weight: Tensor) -> int:
    """Return the minimum rows for which converting these weights for one product pays, if any."""
    if weight.dtype.itemsize != 2 or weight.numel() > _MAX_CONVERTED or not float32_is_faster():
        return sys.maxsize
    return _CONVERTED_ROWS


class GeluLinear(Module):
    """gelu(x @ weight.T + bias) with packed weights as one operator."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        """Pack a dense [out, in] weight; the caller drops the original.

        Raises:
            AttributeError, RuntimeError: the operator is missing or does not support this dtype.
        """
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self.register_buffer("weight", packed)
        self.bias = weight_of(bias)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        result: Tensor = self._product(x, self.weight, self.bias, "gelu", [], "none")
        return result


def gelu_product(weight: Tensor, bias: Tensor) -> Rows | None:
    """Return gelu(x @ weight.T + bias) as one operator, which saves a pass over the result.

    None if the operator is missing or its results differ. The packed weight replaces the original,
    as in `prepare_linear`.
    """
    if weight.device.type != "cpu":
        return None
    try:
        fused = GeluLinear(weight, bias)
        probe = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        x = probe.to(weight.dtype)
        tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
        plain = F.gelu(F.linear(x, weight, bias))
        agrees = torch.allclose(fused(x), plain, rtol=tolerance, atol=tolerance)
    except (AttributeError, RuntimeError) as error:  # no oneDNN, or an unsupported dtype
        logger.info("GELU of weights of type %s is computed separately: %s", weight.dtype, error)
        return None
    return fused if agrees else None


_packable: dict[tuple[torch.dtype, int, int], bool] = {}


def prepare_linear(
    weight: Tensor, bias: Tensor | None = None, *, by_rows: bool = False, by_kernels: bool = False
) -> Rows:
    """Return the fastest product for these weights.

    Each dtype and shape is compared once with the plain product. If the packed product is missing
    or differs, the plain one is used, or one in float32 if that is faster. A packed weight is a
    copy: it replaces the original in memory if the caller keeps no reference to it.

    Args:
        by_rows: whether `RowBlocks` will search for row counts that give a row the same bits.
        by_kernels: whether a kernel of `engine.kernels` can be used, if there is one.
    """
    is_small = weight.dtype == torch.float32 and weight.numel() <= _UNPACKED_WEIGHTS
    if weight.device.type != "cpu" or is_small:
        return DenseLinear(weight, bias)
    key = (weight.dtype, weight.shape[0], weight.shape[1])
    if _packable.get(key) is False:
        return _unpacked(weight, bias, by_rows)
    try:
        packed = PackedLinear(weight, bias, _float32_rows(weight))
        if key not in _packable:
            _packable[key] = _agree(packed, DenseLinear(weight, bias), weight)
    except (AttributeError, RuntimeError) as error:  # no oneDNN, or an unsupported dtype
        logger.info("weights of type %s are not packed: %s", weight.dtype, error)
        _packable[key] = False
    if not _packable[key]:
        return _unpacked(weight, bias, by_rows)
    if by_kernels:
        packed.use_kernel(weight, by_rows=by_rows)
    return packed


def _unpacked(weight: Tensor, bias: Tensor | None, by_rows: bool) -> Rows:
    if not is_worth_converting(weight):
        return DenseLinear(weight, bias)
    if fits_blocks(weight):
        return BlockedLinear(weight, bias, alike=by_rows)
    return ConvertedLinear(weight, bias)


def _agree(packed: PackedLinear, dense: Rows, weight: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, weight.shape[1], generator=generator).to(weight.dtype)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    product = dense(x)
    sums = torch.rand(product.shape, generator=generator).to(weight.dtype)
    return torch.allclose(packed(x), product, rtol=tolerance, atol=tolerance) and torch.allclose(
        packed.add_to(sums.clone(), x), sums + product, rtol=tolerance, atol=tolerance
    )
