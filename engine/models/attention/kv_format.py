"""How the KV cache keeps keys and values: as attention reads them, or rounded to 8 bits.

In 8 bits each key and each value of a head is rounded to torch's float8_e4m3fn, with a scale of its
own that is found when it is written: what a block holds depends on its tokens alone, no model has
to be calibrated, and none has keys that are too large. The scales lie behind the values of their
token, so that one copy moves both. All arithmetic is by stock operators on 16 or 32-bit integers:
torch converts from float8 one value after the other on a CPU, which takes twenty times as long.
"""

from typing import Literal

import torch
from torch import Tensor

KvShape = tuple[int, int, int]
"""What is kept of a token in a layer: parts, KV heads, size of a head."""
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]

_LARGEST = 448.0
"""Of float8_e4m3fn."""
_BIAS = 2.0**120
"""Factor between a float of 8 bits and the float of 16 or 32 bits whose exponent and mantissa have
the same bits. Stored scales include it."""
_LARGEST_SCALE = 2.0**127
_SCALE_BYTES = 2


class PlainKv:
    """Keys and values as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Keep them in `dtype`."""
        self.dtype = dtype
        """What attention is computed in, where rows are short."""
        self.stored = dtype
        """Of the tensors of the cache."""

    def row(self, kept: KvShape) -> tuple[int, ...]:
        """Return the shape of one token in a layer's tensor."""
        return kept

    def write(self, cache: Tensor, slots: Tensor, kept: Tensor) -> None:
        """Store new keys and values, [tokens, parts, kv_heads, head_dim], at flat token slots."""
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kept)

    def read(self, rows: Tensor, kept: KvShape, dtype: torch.dtype) -> Tensor:
        """Return [.., parts, kv_heads, head_dim] in `dtype` of tokens as they are stored."""
        return rows.to(dtype)


class Fp8Kv:
    """Keys and values in 8 bits, a scale for each token and head of them.

    Those above 57,344 become that.
    """

    stored = torch.uint8

    def __init__(self, dtype: torch.dtype) -> None:
        """Have them read in `dtype`."""
        self.dtype = dtype

    def row(self, kept: KvShape) -> tuple[int, ...]:
        """Return the bytes of a token: its values, then their scales in bfloat16."""
        parts, heads, size = kept
        return (parts * heads * (size + _SCALE_BYTES),)

    def write(self, cache: Tensor, slots: Tensor, kept: Tensor) -> None:
        """Round them, and store them at flat token slots."""
        values = kept.float()
        largest = values.abs().amax(-1, keepdim=True)
        scales = (largest * (_BIAS / _LARGEST)).clamp_(1.0, _LARGEST_SCALE).bfloat16()
        values = (values / (scales.float() * (1 / _BIAS))).clamp_(-_LARGEST, _LARGEST)
        rounded = values.to(torch.float8_e4m3fn)
        count = len(kept)
        rows = torch.cat([each.view(torch.uint8).view(count, -1) for each in (rounded, scales)], 1)
        cache.view(-1, cache.shape[2]).index_copy_(0, slots, rows)

    def read(self, rows: Tensor, kept: KvShape, dtype: torch.dtype) -> Tensor:
        """Return what the rounded ones stand for."""
        parts, heads, size = kept
        shape, end = rows.shape[:-1], parts * heads * size
        bits = rows[..., :end].view(torch.int8)
        scales = rows[..., end:].view(torch.bfloat16)
        # Sign to sign, and behind it exponent and mantissa to the lowest bits of the one and the
        # highest of the other. The bits between are copies of the sign.
        if dtype == torch.bfloat16:
            bits = bits.to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x87F0 - (1 << 16))
        else:
            bits = bits.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
            scales = scales.float()
        values = bits.view(scales.dtype).view(*shape, parts, heads, size)
        return values.mul_(scales.view(*shape, parts, heads, 1)).to(dtype)


KvFormat = PlainKv | Fp8Kv
"""What the KV cache of a model holds, and how it is written and read."""


def kv_format(dtype: torch.dtype, setting: KvCacheDtype) -> KvFormat:
    """Return the format that `--kv-cache-dtype` asks for, where attention computes in `dtype`."""
    return PlainKv(dtype) if setting == "auto" else Fp8Kv(dtype)
