"""Products with weights in MXFP4: 4-bit floats (E2M1), in blocks that share a power of two.

The weights stay packed, as in the file, at slightly more than a quarter of the memory of 16 bits. A
product expands some output rows at a time, which stay in a core's cache until they are multiplied.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.module import Module, weight_of
from engine.models.products.row_padding import pad_rows

BLOCK = 32
"""Inputs per scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ONE = 127
"""Stored scale that represents one."""
_NOT_A_NUMBER = 255
_BYTES = 256
_AT_ONCE = 1 << 19
"""Weights expanded at once; they fit a core's L2 cache."""


class Mxfp4Weights(NamedTuple):
    """A weight [out, in]."""

    blocks: Tensor
    """uint8 [out, in / BLOCK, BLOCK / 2]: two values per byte, the first in the low nibble."""
    scales: Tensor
    """uint8 [out, in / BLOCK]: exponents of two with a bias of 127."""

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as floats [out, in]; exact where `dtype` can represent the values."""
        outputs, groups, _ = self.blocks.shape
        # Looking up byte and scale in one table takes half the time of a multiplication.
        index = self.blocks.int().add_((self.scales.int() * _BYTES).unsqueeze(-1))
        pairs = _table(dtype, self.blocks.device).index_select(0, index.flatten())
        return pairs.view(dtype).view(outputs, groups * BLOCK)


class Mxfp4Linear(Module):
    """A matrix product with packed weights."""

    def __init__(self, weights: Mxfp4Weights, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Initialize from the weights, which are expanded to `dtype` in each product."""
        super().__init__()
        self.register_buffer("blocks", weights.blocks)
        self.register_buffer("scales", weights.scales)
        outputs, groups = weights.scales.shape
        rows = max(1, _AT_ONCE // (groups * BLOCK))
        # Equal parts, since oneDNN compiles a product for each shape.
        rows = -(-outputs // -(-outputs // rows))
        self._parts = [
            Mxfp4Weights(*pair)
            for pair in zip(*(torch.split(each, rows) for each in weights), strict=True)
        ]
        self._size = rows * groups * BLOCK
        self.bias = None if bias is None else weight_of(bias)
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        padded = pad_rows(x, self._size)
        outputs = [F.linear(padded, part.expanded(self._dtype)) for part in self._parts]
        product = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return product[: len(x)] if self.bias is None else product[: len(x)] + self.bias


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return both values of each byte for each scale, packed into one integer."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64)
    byte = torch.arange(_BYTES)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    scales = torch.pow(2.0, torch.arange(_BYTES, dtype=torch.float64) - _ONE)
    scales[_NOT_A_NUMBER] = float("nan")
    whole = (scales.view(-1, 1, 1) * pairs).to(dtype).contiguous()
    return whole.view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten().to(device)
