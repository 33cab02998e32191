"""Products of 16-bit weights in blocks of outputs, for processors without 16-bit arithmetic.

A product of few rows is bound by reading its weights. Where oneDNN has no 16-bit product (x86 with
only AVX2), torch's reads at half the memory bandwidth, but its `embedding_bag` does not: with the
weights of one input and 64 outputs as an embedding, a product is a weighted sum over the inputs, in
float32, rounded once. For more rows it pays to convert the weights to float32, a few blocks at a
time, in a buffer that stays in the caches.
"""

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.module import Module, weight_of

logger = logging.getLogger(__name__)

_OUTPUTS = 64
"""Outputs per block: an embedding spans two cache lines, which are read contiguously."""
_MAX_PADDING = 8
"""At most 1/8 of the outputs may be padding in the last block."""
_FEW_ROWS = 8
"""Maximum rows for which reading the weights once per row beats converting them once."""
_MAX_EMBEDDINGS = 1 << 18
"""Maximum embeddings per sum; their cached indices take 1 MB."""
_MAX_WEIGHTS = 1 << 20
"""Maximum weights converted at once: 4 MB in float32."""
_MAX_BLOCKS = 8
"""Maximum blocks converted at once."""
_MANY_ROWS = 256
"""Minimum rows for which one product over several blocks beats one product per block."""


class BlockedLinear(Module):
    """A matrix product with 16-bit weights stored in blocks of outputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, alike: bool = False) -> None:
        """Copy a dense [out, in] weight of 16-bit floats into blocks; the caller drops it.

        Args:
            alike: compute few rows like many, which is slower but gives a row the same bits.
        """
        super().__init__()
        self._num_outputs = len(weight)
        self.bias = None if bias is None else weight_of(bias)
        self._few_rows = 0 if alike else _FEW_ROWS
        padded = F.pad(weight, (0, 0, 0, -len(weight) % _OUTPUTS))
        blocks = padded.view(-1, _OUTPUTS, weight.shape[1]).transpose(1, 2).contiguous()
        self.blocks = weight_of(blocks)
        """[blocks, in, 64]"""

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if 0 < len(x) <= self._few_rows:
            product = _weighted_sums(x, self.blocks)[:, : self._num_outputs]
            return product if self.bias is None else product + self.bias
        product = _converted_product(x, self.blocks)[:, : self._num_outputs]
        return (product if self.bias is None else product.add_(self.bias)).to(x.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [indices, in] of the weight, as in an embedding lookup."""
        return self.blocks[indices // _OUTPUTS, :, indices % _OUTPUTS]


def _weighted_sums(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product of few rows [rows, in] and blocks [blocks, in, 64], in their dtype."""
    rows, width = x.shape
    at_once = max(1, _MAX_EMBEDDINGS // (rows * width))
    weights = x.expand(min(at_once, len(blocks)), rows, width).reshape(-1)
    parts = torch.split(blocks, at_once)
    sums = [_sums(part, weights[: len(part) * rows * width], rows) for part in parts]
    joined = sums[0] if len(sums) == 1 else torch.cat(sums)
    return joined.transpose(0, 1).reshape(rows, len(blocks) * _OUTPUTS)


def _sums(blocks: Tensor, weights: Tensor, rows: int) -> Tensor:
    """Return [blocks, rows, 64] from blocks [blocks, in, 64] and weights [blocks * rows * in]."""
    num_blocks, width, _ = blocks.shape
    indices, starts = _bags(num_blocks, rows, width)
    table = blocks.view(-1, _OUTPUTS)
    sums: Tensor = torch.embedding_bag(table, indices, starts, False, 0, False, weights)[0]
    return sums.view(num_blocks, rows, _OUTPUTS)


def _bags(num_blocks: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the embedding indices of all sums, concatenated, and the start of each sum."""
    indices, starts = _max_bags(rows, width)
    if num_blocks * rows > len(starts):
        return _new_bags(num_blocks, rows, width)  # one block alone exceeds the maximum
    return indices[: num_blocks * rows * width], starts[: num_blocks * rows]


@cache
def _max_bags(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return _new_bags(_MAX_EMBEDDINGS // (rows * width), rows, width)


def _new_bags(num_blocks: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    embeddings = torch.arange(num_blocks * width, dtype=torch.int32).view(num_blocks, 1, width)
    starts = torch.arange(num_blocks * rows, dtype=torch.int32) * width
    return embeddings.expand(num_blocks, rows, width).reshape(-1), starts


def _converted_product(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product of rows [rows, in] and blocks [blocks, in, 64], in float32.

    Converts only some blocks to float32 at a time.
    """
    num_blocks, width, _ = blocks.shape
    rows, inputs = len(x), x.float()
    at_once = min(_MAX_BLOCKS, max(1, _MAX_WEIGHTS // max(1, width * _OUTPUTS)), num_blocks)
    product = inputs.new_empty(rows, num_blocks * _OUTPUTS)
    converted = inputs.new_empty(at_once * width * _OUTPUTS)
    for first in range(0, num_blocks, at_once):
        part = blocks[first : first + at_once]
        here = converted[: part.numel()]
        result = product[:, first * _OUTPUTS : (first + len(part)) * _OUTPUTS]
        if rows < _MANY_ROWS:
            products = torch.matmul(inputs, here.view(part.shape).copy_(part))
            result.view(rows, len(part), _OUTPUTS).copy_(products.transpose(0, 1))
        else:
            joined = here.view(width, len(part), _OUTPUTS).copy_(part.transpose(0, 1))
            torch.mm(inputs, joined.view(width, -1), out=result)
    return product


def fits_blocks(weight: Tensor) -> bool:
    """Return whether products with a weight [out, in] worth converting are faster in blocks."""
    if -len(weight) % _OUTPUTS > len(weight) // _MAX_PADDING:
        return False
    return _sums_are_right(weight.dtype)


def _has_fast_sums() -> bool:
    """Return whether torch includes FBGEMM, whose sums prefetch the weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def _sums_are_right(dtype: torch.dtype) -> bool:
    """Return whether weighted embedding sums are fast and compute correct products."""
    if not _has_fast_sums():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUTPUTS, 96, generator=generator).to(dtype)
    x = torch.randn(3, 96, generator=generator).to(dtype)
    try:
        result = BlockedLinear(weight, None)(x)
    except (RuntimeError, TypeError) as error:  # unsupported dtype or different signature
        logger.info("weights of type %s are not laid out in blocks: %s", dtype, error)
        return False
    return torch.allclose(result.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
