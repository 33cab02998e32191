"""Weights as 8 or 4-bit floats, with scales per tensor, output, group or block."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.formats.quantized_integers import BadQuantization, Parts

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class FloatWeight(NamedTuple):
    """One weight [out, in]: value * scale."""

    values: Tensor
    """Any float dtype [out, in], or uint8 [out, in / 2] with two E2M1 each, low nibble first."""
    scales: Tensor
    """float32; one per `block` of rows and columns."""
    block: tuple[int, int]

    def rows(self, first: int, last: int) -> Tensor:
        """Return some rows of the weight as float32 [rows, in]."""
        values = self.values[first:last]
        values = _from_e2m1(values) if values.dtype == torch.uint8 else values.float()
        high, wide = self.block
        last = first + len(values)
        scales = self.scales[first // high : -(-last // high)].repeat_interleave(high, 0)
        scales = scales[first % high :][: len(values)]
        return values * scales.repeat_interleave(wide, 1)[:, : values.shape[1]]


def read_float8(parts: Parts, block: tuple[int, int] | None) -> FloatWeight:
    """Read an 8-bit float `weight` [out, in] and its `weight_scale` or `weight_scale_inv`.

    Args:
        block: rows and columns that share a scale, if the config specifies them.

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    values, scales = parts("weight"), parts("weight_scale_inv")
    scales = parts("weight_scale") if scales is None else scales
    if values is None or scales is None or values.dtype not in _FLOAT8 or values.dim() != 2:
        raise BadQuantization("weight is not a matrix of 8-bit floats with a weight_scale")
    scales = scales.float()
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    num_outputs, num_inputs = values.shape
    if block is None or not _fits(values, scales, block):  # per tensor, output or group
        high = num_outputs if len(scales) == 1 else 1
        block = (high, max(1, num_inputs // scales.shape[1]))
    if not _fits(values, scales, block):
        raise BadQuantization(
            f"scales {list(scales.shape)} do not fit weights {list(values.shape)}"
        )
    return FloatWeight(values, scales, block)


def read_nvfp4(parts: Parts) -> FloatWeight:
    """Read NVFP4 of compressed-tensors: a scale per 16 inputs, and a global one.

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    values, scales, whole = (
        parts(name) for name in ("weight_packed", "weight_scale", "weight_global_scale")
    )
    if values is None or scales is None or whole is None:
        raise BadQuantization("weight_packed, weight_scale and weight_global_scale are needed")
    num_inputs = 2 * values.shape[1]
    if list(scales.shape) != [len(values), num_inputs // 16] or num_inputs % 16:
        raise BadQuantization(f"scales {list(scales.shape)} do not fit {list(values.shape)}")
    return FloatWeight(values, scales.float() / whole.float().reshape(()), (1, 16))


def _fits(values: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
    counts = [-(-size // step) for size, step in zip(values.shape, block, strict=True)]
    return list(scales.shape) == counts


def _from_e2m1(values: Tensor) -> Tensor:
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    halves = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    return table[halves.long()]
