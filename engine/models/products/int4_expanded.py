"""Products of many rows with weights that torch has packed in 4 bits, expanded some at a time.

torch's own product takes as long for each further row. Expanding weights takes as long as it does
for some dozens of rows, after which a row costs what it costs with dense weights. How torch packs
them depends on the processor and is not documented, so it is found out by packing known codes.
"""

from functools import cache

import torch
from torch import Tensor

MIDDLE = 8.0
"""What torch's product takes off every code."""
_AT_ONCE = 1 << 19
"""Weights that are expanded at once: 2 MB in float32, which stay in the caches."""
_BLOCKS = (64, 32)
"""Numbers of outputs that torch may pack together."""
_PROBED_INPUTS = 32


def pack(codes: Tensor) -> Tensor:
    """Return codes uint8 [out, in] as torch's product takes them: uint8 [out, in / 2]."""
    packed: Tensor = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed


class ExpandedInt4:
    """A matrix product with packed weights, none of which stay expanded."""

    __slots__ = ("_at_once", "_compute_type", "_group", "_packed", "_scales")

    def __init__(
        self, packed: Tensor, scales: Tensor, block: int, compute_type: torch.dtype
    ) -> None:
        """Take weights for which `packed_block` is `block`.

        Args:
            packed: by `pack`.
            scales: [groups, out, 2]: scales, and what is added to a code of 8 times the scale.
            compute_type: what weights are expanded to and multiplied in.
        """
        outputs, half = packed.shape
        self._packed = packed.view(outputs // block, 2 * half, block // 2).transpose(0, 1)
        self._scales = scales
        self._group = 2 * half // len(scales)
        self._at_once = max(1, _AT_ONCE // (2 * half * block))
        self._compute_type = compute_type

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out] in the type of the computation."""
        inputs = x.to(self._compute_type)
        _, blocks, half = self._packed.shape
        product = inputs.new_empty(len(x), 2 * blocks * half)
        for first in range(0, blocks, self._at_once):
            last = min(blocks, first + self._at_once)
            place = slice(2 * first * half, 2 * last * half)
            weights = self._expanded(self._packed[:, first:last], self._scales[:, place])
            torch.mm(inputs, weights.to(self._compute_type), out=product[:, place])
        return product

    def _expanded(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Return the weights [in, out] of some outputs in float32."""
        scale, offset = scales.float().unsqueeze(1).unbind(3)
        codes = _unpacked(packed, torch.float32).view(len(scales), self._group, -1)
        return codes.mul_(scale).add_(offset - MIDDLE * scale).view(len(packed), -1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes [in, out] for bytes [in, blocks, block / 2].

    The first half of a block's outputs is in the lower bits, the second half in the upper ones.
    """
    inputs, blocks, half = packed.shape
    codes = torch.empty(inputs, blocks, 2, half, dtype=dtype)
    codes[:, :, 0] = packed & 15
    codes[:, :, 1] = packed >> 4
    return codes.view(inputs, -1)


def packed_block(outputs: int) -> int | None:
    """Return how many outputs torch packs together here; None if these are not whole blocks, or
    packed in another way than is known."""
    block = _block()
    return block if block is not None and outputs % block == 0 else None


@cache
def _block() -> int | None:
    for block in _BLOCKS:
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 16, (2 * block, _PROBED_INPUTS), generator=generator)
        packed = pack(codes).view(2, _PROBED_INPUTS, block // 2).transpose(0, 1)
        if torch.equal(_unpacked(packed, torch.int64), codes.T):
            return block
    return None
