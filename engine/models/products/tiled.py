"""Products of weights in oneDNN's blocks by a kernel of our own, on a matrix unit.

A row gets the same bits among any number of rows. Weights are read as fast as memory gives them,
which few rows wait for.
"""

from functools import cache

import torch
from torch import Tensor

from engine.models.kernels.choice import is_close, trusted
from engine.models.kernels.tile_product import BLOCK, GROUP, product
from engine.models.kernels.tiles import TILE_ROWS, has_tiles, palette

_CHUNK = 256
"""Inputs for which rows, weights and sums of two patches stay in a cache of the first level. Few
rows have no use for that, and read weights in the order of memory."""

_agreed: dict[tuple[int, int, bool], bool] = {}
"""Whether the kernel computes the same, by outputs, inputs, and whether there is no bias."""


class TiledProduct:
    """A product with packed weights of bfloat16."""

    def __init__(self, packed: Tensor, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Take what `_reorder_linear_weight` makes of [outputs, inputs].

        Raises:
            RuntimeError: it has not the layout that the kernel reads.
        """
        size = torch.ops.mkldnn._nbytes(packed)
        if outputs % BLOCK or inputs % BLOCK or size != 2 * outputs * inputs:
            raise RuntimeError(f"weights [{outputs}, {inputs}] are packed in other blocks")
        self._held = packed, bias
        self._weights = torch.ops.mkldnn.data_ptr(packed)
        self._bias = 0 if bias is None else bias.data_ptr()
        self._outputs, self._inputs = outputs, inputs

    def __call__(self, x: Tensor, addends: Tensor | None = None) -> Tensor:
        """Map [rows, inputs] to [rows, outputs], plus addends of that shape, rounded once."""
        x, rows = x.contiguous(), len(x)
        addends = None if addends is None else addends.contiguous()
        out = torch.empty(rows, self._outputs, dtype=x.dtype)
        if not rows:
            return out
        blocks, groups = self._outputs // BLOCK, -(-rows // GROUP)
        columns, parts = _divided(blocks, groups, torch.get_num_threads())
        product(
            columns * parts,
            x.data_ptr(),
            self._weights,
            self._bias,
            0 if addends is None else addends.data_ptr(),
            out.data_ptr(),
            palette(min(rows, TILE_ROWS)).ctypes.data,
            rows,
            self._inputs,
            self._outputs,
            columns,
            parts,
            self._inputs if rows <= GROUP else _CHUNK,
        )
        return out


def tiled_product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> TiledProduct | None:
    """Return a product with what oneDNN packed [outputs, inputs] into, if there is a kernel for it.

    Each shape is compared once with oneDNN's own product.
    """
    if weight.dtype != torch.bfloat16 or not has_tiles():
        return None
    outputs, inputs = weight.shape
    key = outputs, inputs, bias is None
    if _agreed.get(key) is False:
        return None
    made = trusted(
        lambda: TiledProduct(packed, outputs, inputs, bias),
        lambda product: key in _agreed or _agrees(product, packed, weight, bias),
        f"products with [{outputs}, {inputs}]",
    )
    _agreed[key] = made is not None
    return made


def _agrees(product: TiledProduct, packed: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Compare a product of few rows, and of more with addends."""
    generator = torch.Generator().manual_seed(0)
    x, addends = (
        torch.randn(GROUP + 1, size, generator=generator).bfloat16() for size in weight.shape[::-1]
    )
    operator = torch.ops.mkldnn._linear_pointwise
    few = operator.default(x[:3], packed, bias, "none", [], "")
    return is_close(product(x[:3]), few) and is_close(
        product(x, addends), operator.binary(x, addends.clone(), packed, bias, "add")
    )


@cache
def _divided(blocks: int, groups: int, threads: int) -> tuple[int, int]:
    """Return in how many parts to divide columns and rows, so that no thread has much more work.

    Columns first, so that weights are read by one thread.
    """

    def price(parts: int) -> int:
        columns = min(blocks, threads // parts)
        return -(-blocks // columns) * -(-groups // parts)

    parts = min(range(1, min(groups, threads) + 1), key=price)
    return min(blocks, threads // parts), parts
