"""Products with 4-bit weights on processors: a scale and a zero point for each group of inputs.

Weights take a quarter of the memory of 16 bits. For one or a few rows that is also faster, as
reading the weights is what takes the time. As torch's product takes as long for each further row,
weights are expanded for many rows (docs/models.md has figures).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.processor import float32_is_faster
from engine.models.products.int4_expanded import MIDDLE, ExpandedInt4, pack, packed_block

_GROUPS = (128, 64, 32)
"""Inputs per group that dense weights are quantized in, whichever divides the inputs first."""
_KNOWN_GROUPS = (32, 64, 128, 256)
"""Inputs per group that torch's product takes."""
_OUTPUTS = 16
"""Outputs come in multiples of it."""
_MANY_ROWS = 65
"""Rows from which weights are expanded: more than are computed at once where no row may depend on
how many there are (`engine.models.products.row_blocks`)."""
_LARGEST = 15
_SMALLEST_RANGE = 1e-30


class Int4Unsupported(ValueError):
    """This device, type or build has no 4-bit product."""


class Int4Weights(NamedTuple):
    """A weight [out, in]: (code - zero) * scale."""

    codes: Tensor
    """uint8 [out, in], 0 to 15."""
    scales: Tensor
    """float32 [out, groups]; groups are equally many inputs, in order."""
    zeros: Tensor
    """float32 [out, groups], in the units of codes."""


class Int4Linear:
    """A matrix product with 4-bit weights; activations come and go in their own 16-bit type."""

    __slots__ = ("_bias", "_expanded", "_group", "_packed", "_scales")

    def __init__(self, weights: Int4Weights, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Pack weights for which `fits_int4` holds; the caller drops the original."""
        self._group = weights.codes.shape[1] // weights.scales.shape[1]
        self._packed = pack(weights.codes)
        offsets = (MIDDLE - weights.zeros) * weights.scales
        self._scales = torch.stack((weights.scales.T, offsets.T), dim=2).to(dtype).contiguous()
        self._bias = bias
        block = packed_block(len(weights.codes))
        self._expanded = None
        if block is not None:
            compute_type = torch.float32 if float32_is_faster() else dtype
            self._expanded = ExpandedInt4(self._packed, self._scales, block, compute_type)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in] to [rows, out]."""
        if self._expanded is not None and len(x) >= _MANY_ROWS:
            product = self._expanded(x)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._packed, self._group, self._scales
            )
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)


def joined(parts: list[Int4Weights]) -> Int4Weights | None:
    """Return weights one below the other; None if their groups differ."""
    if len({part.scales.shape[1] for part in parts}) != 1:
        return None
    codes, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    return Int4Weights(codes, scales, zeros)


def quantized(weight: Tensor) -> Int4Weights | None:
    """Round a dense [out, in] weight, each group to its own range; None if none divides it."""
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
    """Whether torch's product takes weights of this shape."""
    outputs, inputs = weights.codes.shape
    groups = weights.scales.shape[1]
    return outputs % _OUTPUTS == 0 and inputs % groups == 0 and inputs // groups in _KNOWN_GROUPS


def require_int4(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what the product cannot do, before weights are read.

    Args:
        setting: the value of `--quantization` that asks for it.

    Raises:
        Int4Unsupported: with what to do.
    """
    if device.type != "cpu":
        raise Int4Unsupported(f"--quantization {setting} is for models on the CPU (--device cpu)")
    if dtype.itemsize != 2:
        raise Int4Unsupported(f"--quantization {setting} computes in 16 bits: --dtype bfloat16")
