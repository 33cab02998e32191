"""Storage formats of the KV cache: the compute dtype, or rounded to 8 bits.

In 8 bits each key and value of a head is rounded to float8_e4m3fn, with its own scale computed when
it is written. A block's contents therefore depend only on its tokens, and no model needs
calibration. Scales follow the values of their token, so one copy moves both. Conversion uses stock
operators on 16 or 32-bit integers: torch's float8 conversion on a CPU is scalar and twenty times
slower.
"""

from typing import Literal

import torch
from torch import Tensor

KvShape = tuple[int, int, int]
"""Shape kept per token and layer: parts, KV heads, head size."""
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]

_LARGEST = 448.0
"""Maximum finite value of float8_e4m3fn."""
_BIAS = 2.0**120
"""Ratio of an 8-bit float to the 16 or 32-bit float with the same exponent and mantissa bits.
Stored scales include it."""
_LARGEST_SCALE = 2.0**127
_SCALE_BYTES = 2


class PlainKv:
    """Keys and values in the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Store them in `dtype`."""
        self.dtype = dtype
        """Dtype in which short rows are computed."""
        self.stored = dtype
        """Dtype of the cache tensors."""

    def row(self, shape: KvShape) -> tuple[int, ...]:
        """Return the shape of one token in a layer's tensor."""
        return shape

    def write(self, cache: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Store new keys and values, [tokens, parts, kv_heads, head_dim], at flat token slots."""
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, entries)

    def read(self, rows: Tensor, entry_shape: KvShape, dtype: torch.dtype) -> Tensor:
        """Return stored rows as [.., parts, kv_heads, head_dim] in `dtype`."""
        return rows.to(dtype)


class Fp8Kv:
    """Keys and values in 8 bits, with one scale per token and head.

    Magnitudes above 57,344 are clamped.
    """

    stored = torch.uint8

    def __init__(self, dtype: torch.dtype) -> None:
        """Read them as `dtype`."""
        self.dtype = dtype

    def row(self, shape: KvShape) -> tuple[int, ...]:
        """Return the bytes per token: its values, then their scales in bfloat16."""
        parts, heads, size = shape
        return (parts * heads * (size + _SCALE_BYTES),)

    def write(self, cache: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Round and store new keys and values at flat token slots."""
        values = entries.float()
        largest = values.abs().amax(-1, keepdim=True)
        scales = (largest * (_BIAS / _LARGEST)).clamp_(1.0, _LARGEST_SCALE).bfloat16()
        values = (values / (scales.float() * (1 / _BIAS))).clamp_(-_LARGEST, _LARGEST)
        rounded = values.to(torch.float8_e4m3fn)
        count = len(entries)
        rows = torch.cat([each.view(torch.uint8).view(count, -1) for each in (rounded, scales)], 1)
        cache.view(-1, cache.shape[2]).index_copy_(0, slots, rows)

    def read(self, rows: Tensor, entry_shape: KvShape, dtype: torch.dtype) -> Tensor:
        """Return stored rows, dequantized to `dtype`."""
        parts, heads, size = entry_shape
        shape, end = rows.shape[:-1], parts * heads * size
        bits = rows[..., :end].view(torch.int8)
        scales = rows[..., end:].view(torch.bfloat16)
        # Move the sign to the sign bit, and exponent and mantissa to the lowest exponent and
        # highest mantissa bits. The bits between are copies of the sign.
        if dtype == torch.bfloat16:
            bits = bits.to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x87F0 - (1 << 16))
        else:
            bits = bits.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
            scales = scales.float()
        values = bits.view(scales.dtype).view(*shape, parts, heads, size)
        return values.mul_(scales.view(*shape, parts, heads, 1)).to(dtype)


KvFormat = PlainKv | Fp8Kv
"""Storage format of a model's KV cache."""


def kv_format(dtype: torch.dtype, setting: KvCacheDtype) -> KvFormat:
    """Return the format selected by `--kv-cache-dtype`, for attention computed in `dtype`."""
    return PlainKv(dtype) if setting == "auto" else Fp8Kv(dtype)
