"""Products with weights in oneDNN's blocks by kernels of this package.

A row gets the same bits with any number of rows. Weights are read at memory bandwidth, which bounds
products of few rows.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu import pair_product, pair_sums, tile_product
from engine.kernels.cpu.amx import TILE_ROWS, has_tiles, palette
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.cpu.compiling import Kernel
from engine.kernels.processor import Kind, kind
from engine.kernels.trust import is_close, trusted

_CHUNK = 256
"""Inputs for which rows, weights and sums of two patches of tiles fit the L1 cache. Few rows do not
need this, and read weights sequentially."""

_agreed: dict[tuple[Kernel, int, int, bool], bool] = {}
"""Whether a kernel agrees with oneDNN, by kernel, outputs, inputs, and absence of a bias."""


class ProductKernel(NamedTuple):
    """A kernel and its requirements on a product."""

    compute: Kernel
    """Its arguments are those of `engine.kernels.cpu.results.Product`."""
    block: int
    """Outputs per block of weights."""
    input_block: int
    """The number of inputs must be a multiple of this."""
    group: int
    """Rows computed together."""
    palette_of: Callable[[int], int]
    """Returns the address of the palette for a number of rows, 0 without tiles."""


def product_kernel() -> ProductKernel | None:
    """Return the kernel for this kind of processor, if there is one."""
    return _kernel_for(kind())


@cache
def _kernel_for(which: Kind) -> ProductKernel | None:
    if which is Kind.AMX and has_tiles():
        return ProductKernel(
            tile_product.product,
            tile_product.BLOCK,
            tile_product.BLOCK,
            tile_product.GROUP,
            lambda rows: palette(min(rows, TILE_ROWS)).ctypes.data,
        )
    if which is Kind.AMD_AVX512_BF16 and has_pairs():
        return ProductKernel(
            pair_product.product,
            pair_product.BLOCK,
            2,
            pair_sums.GROUP,
            lambda _: 0,
        )
    return None


class CompiledProduct:
    """A product with packed weights of bfloat16."""

    def __init__(
        self,
        kernel: ProductKernel,
        packed: Tensor,
        outputs: int,
        inputs: int,
        bias: Tensor | None,
    ) -> None:
        """Initialize from weights [outputs, inputs] packed by `_reorder_linear_weight`.

        Raises:
            RuntimeError: they do not have the layout that the kernel reads.
        """
        if torch.ops.mkldnn._nbytes(packed) != 2 * outputs * inputs:
            raise RuntimeError(f"weights [{outputs}, {inputs}] are packed in an unsupported layout")
        self._kernel = kernel
        self._held = packed, bias
        self._weights = torch.ops.mkldnn.data_ptr(packed)
        self._bias = 0 if bias is None else bias.data_ptr()
        self._outputs, self._inputs = outputs, inputs

    def __call__(self, x: Tensor, addends: Tensor | None = None) -> Tensor:
        """Map [rows, inputs] to [rows, outputs], plus addends of that shape, rounded once."""
        x, rows, kernel = x.contiguous(), len(x), self._kernel
        addends = None if addends is None else addends.contiguous()
        out = torch.empty(rows, self._outputs, dtype=x.dtype)
        if not rows:
            return out
        blocks, groups = self._outputs // kernel.block, -(-rows // kernel.group)
        columns, parts = _divided(blocks, groups, torch.get_num_threads())
        kernel.compute(
            columns * parts,
            x.data_ptr(),
            self._weights,
            self._bias,
            0 if addends is None else addends.data_ptr(),
            out.data_ptr(),
            kernel.palette_of(rows),
            rows,
            self._inputs,
            self._outputs,
            columns,
            parts,
            self._inputs if rows <= kernel.group else _CHUNK,
        )
        return out


def compiled_product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> CompiledProduct | None:
    """Return a kernel product with oneDNN's packed [outputs, inputs], or None.

    The kernel requires whole blocks. Each shape is compared once with oneDNN's own product.
    """
    kernel = product_kernel()
    if weight.dtype != torch.bfloat16 or kernel is None:
        return None
    outputs, inputs = weight.shape
    if outputs % kernel.block or inputs % kernel.input_block:
        return None
    key = kernel.compute, outputs, inputs, bias is None
    if _agreed.get(key) is False:
        return None
    made = trusted(
        lambda: CompiledProduct(kernel, packed, outputs, inputs, bias),
        lambda product: key in _agreed or _agrees(product, packed, weight, bias),
        f"products with [{outputs}, {inputs}]",
    )
    _agreed[key] = made is not None
    return made


def _agrees(product: CompiledProduct, packed: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Compare a product of few rows, and one of more rows with addends."""
    generator = torch.Generator().manual_seed(0)
    x, addends = (
        torch.randn(33, size, generator=generator).bfloat16() for size in weight.shape[::-1]
    )
    operator = torch.ops.mkldnn._linear_pointwise
    few = operator.default(x[:3], packed, bias, "none", [], "")
    return is_close(product(x[:3]), few) and is_close(
        product(x, addends), operator.binary(x, addends.clone(), packed, bias, "add")
    )


@cache
def _divided(blocks: int, groups: int, threads: int) -> tuple[int, int]:
    """Return the numbers of column and row parts that balance the threads' work.

    Columns are divided first, so that each weight is read by one thread.
    """

    def price(parts: int) -> int:
        columns = min(blocks, threads // parts)
        return -(-blocks // columns) * -(-groups // parts)

    parts = min(range(1, min(groups, threads) + 1), key=price)
    return min(blocks, threads // parts), parts
