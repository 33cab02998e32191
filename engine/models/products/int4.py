"""Products with 4-bit weights on CPUs: a scale and a zero point for each group of inputs.

Weights take a quarter of the memory of 16 bits. For one or a few rows this is also faster, since
reading the weights dominates. The time of torch's product is linear in the rows, so weights are
expanded for many rows (docs/models.md has figures).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.processor import float32_is_faster
from engine.models.module import Module, weight_of

MIDDLE = 8.0
"""Offset that torch's product subtracts from every code."""
_AT_ONCE = 1 << 19
"""Weights expanded at once: 2 MB in float32, which stay in the caches."""
_BLOCKS = (64, 32)
"""Possible numbers of outputs that torch packs together."""
_PROBED_INPUTS = 32


def pack(codes: Tensor) -> Tensor:
    """Pack codes uint8 [out, in] to uint8 [out, in / 2], the input of torch's product."""
    packed: Tensor = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed


class ExpandedInt4:
    """A matrix product with packed weights, some of which are expanded at a time.

    Expanding the weights takes as long as torch's own product of a few dozen rows; beyond that a
    row costs as much as with dense weights. torch's packing depends on the processor and is
    undocumented, so it is detected by packing known codes.
    """

    __slots__ = ("_at_once", "_compute_type", "_group", "_packed", "_scales")

    def __init__(
        self, packed: Tensor, scales: Tensor, block: int, compute_type: torch.dtype
    ) -> None:
        """Initialize from weights for which `packed_block` is `block`.

        Args:
            packed: output of `pack`.
            scales: [groups, out, 2]: scales, and the values that a code of 8 stands for.
            compute_type: dtype in which weights are expanded and multiplied.
        """
        outputs, half = packed.shape
        self._packed = packed.view(outputs // block, 2 * half, block // 2).transpose(0, 1)
        self._scales = scales
        self._group = 2 * half // len(scales)
        self._at_once = max(1, _AT_ONCE // (2 * half * block))
        self._compute_type = compute_type

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out] in the compute dtype."""
        inputs = x.to(self._compute_type)
        _, blocks, half = self._packed.shape
        product = inputs.new_empty(len(x), 2 * blocks * half)
        for first in range(0, blocks, self._at_once):
            last = min(blocks, first + self._at_once)
            columns = slice(2 * first * half, 2 * last * half)
            weights = self._expanded(self._packed[:, first:last], self._scales[:, columns])
            torch.mm(inputs, weights.to(self._compute_type), out=product[:, columns])
        return product

    def _expanded(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Return the weights [in, out] of some outputs in float32."""
        scale, offset = scales.float().unsqueeze(1).unbind(3)
        codes = _unpacked(packed, torch.float32).view(len(scales), self._group, -1)
        return codes.mul_(scale).add_(offset - MIDDLE * scale).view(len(packed), -1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes [in, out] for bytes [in, blocks, block / 2].

    The low nibbles hold the first half of a block's outputs, the high nibbles the second half.
    """
    inputs, blocks, half = packed.shape
    codes = torch.empty(inputs, blocks, 2, half, dtype=dtype)
    codes[:, :, 0] = packed & 15
    codes[:, :, 1] = packed >> 4
    return codes.view(inputs, -1)


def packed_block(outputs: int) -> int | None:
    """Return the number of outputs that torch packs together here.

    None if it does not divide `outputs` or the packing is unknown.
    """
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


_GROUPS = (128, 64, 32)
"""Group sizes for quantizing dense weights; the first that divides the inputs is used."""
_KNOWN_GROUPS = (32, 64, 128, 256)
"""Group sizes supported by torch's product."""
_OUTPUTS = 16
"""torch's product requires a multiple of this many outputs."""
_MANY_ROWS = 65
"""Minimum rows for which weights are expanded: more than are computed at once if no row may depend
on the row count (`engine.models.products.row_blocks`)."""
_LARGEST = 15
_SMALLEST_RANGE = 1e-30


class Int4Unsupported(ValueError):
    """This device, dtype or build has no 4-bit product."""


class Int4Weights(NamedTuple):
    """A weight [out, in]: (code - zero) * scale."""

    codes: Tensor
    """uint8 [out, in], 0 to 15."""
    scales: Tensor
    """float32 [out, groups]; all groups have the same number of inputs, in order."""
    zeros: Tensor
    """float32 [out, groups], in units of codes."""


class Int4Linear(Module):
    """A matrix product with 4-bit weights; activations keep their 16-bit dtype."""

    packed: Tensor
    scales: Tensor

    def __init__(self, weights: Int4Weights, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Pack weights for which `fits_int4` holds; the caller drops the original."""
        super().__init__()
        self._group = weights.codes.shape[1] // weights.scales.shape[1]
        self.register_buffer("packed", pack(weights.codes))
        offsets = (MIDDLE - weights.zeros) * weights.scales
        scales = torch.stack((weights.scales.T, offsets.T), dim=2).to(dtype).contiguous()
        self.register_buffer("scales", scales)
        self.bias = None if bias is None else weight_of(bias)
        block = packed_block(len(weights.codes))
        self._expanded = None
        if block is not None:
            compute_type = torch.float32 if float32_is_faster() else dtype
            self._expanded = ExpandedInt4(self.packed, self.scales, block, compute_type)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if self._expanded is not None and len(x) >= _MANY_ROWS:
            product = self._expanded(x)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.packed, self._group, self.scales
            )
        return (product if self.bias is None else product.add_(self.bias)).to(x.dtype)


def joined(parts: list[Int4Weights]) -> Int4Weights | None:
    """Concatenate weights along the outputs; None if their group counts differ."""
    if len({part.scales.shape[1] for part in parts}) != 1:
        return None
    codes, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    return Int4Weights(codes, scales, zeros)


def quantized(weight: Tensor) -> Int4Weights | None:
    """Quantize a dense [out, in] weight per group; None if no group size divides the inputs."""
    outputs, inputs = weight.shape
    group = next((size for size in _GROUPS if inputs % size == 0), None)
    if group is None:
        return None
    grouped = weight.float().view(outputs, -1, group)
    low = grouped.amin(2, keepdim=True).clamp_max_(0.0)
    high = grouped.amax(2, keepdim=True).clamp_min_(0.0)
    scales = (high - low).clamp_min_(_SMALLEST_RANGE) / _LARGEST
    zeros = (-low / scales).round_()
    codes = (grouped / scales + zeros).round_().clamp_(0, _LARGEST).to(torch.uint8)
    return Int4Weights(codes.view(outputs, inputs), scales.squeeze(2), zeros.squeeze(2))


def fits_int4(weights: Int4Weights) -> bool:
    """Return whether torch's product supports weights of this shape."""
    outputs, inputs = weights.codes.shape
    groups = weights.scales.shape[1]
    return outputs % _OUTPUTS == 0 and inputs % groups == 0 and inputs // groups in _KNOWN_GROUPS


def require_int4(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the product is supported, before weights are read.

    Args:
        setting: value of `--quantization`, for the error.

    Raises:
        Int4Unsupported: the device or dtype is not supported.
    """
    if device.type != "cpu":
        raise Int4Unsupported(f"--quantization {setting} is for models on the CPU (--device cpu)")
    if dtype.itemsize != 2:
        raise Int4Unsupported(f"--quantization {setting} computes in 16 bits: --dtype bfloat16")
