"""Expands blocks of GGUF's quantized types to float32, or extracts 4-bit codes.

The most common types are expanded here, several times as fast as by the gguf package, which handles
the others.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Blocks are bytes [blocks,
bytes per block]; numbers are little-endian.
"""

from collections.abc import Callable

import gguf
import torch
from torch import Tensor

from engine.models.products.mxfp4 import Mxfp4Weights

_PARTS = 8
"""Parts of a 256-element block, each with its own scale, in Q4_K and Q5_K."""


def expand(blocks: Tensor, storage: str) -> Tensor:
    """Return the elements [blocks, elements per block] in float32.

    Args:
        blocks: [blocks, bytes] uint8
        storage: name of the type, as in `engine.shared.gguf.reader.storage_types`.
    """
    if storage in EXPANSIONS:
        return EXPANSIONS[storage](blocks)
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[storage]))


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the 16-bit float at byte `at` of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return all low nibbles, then all high ones, [.., 2 * bytes]."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 6-bit scales and minima of a block's parts, each [blocks, 8], from 12 bytes.

    The first four of each are the low six bits of bytes 0-3 and 4-7. The others have their low four
    bits in bytes 8-11 and the rest in the top bits of bytes 0-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=1)
    return scales.float(), minima.float()


def _by_parts(blocks: Tensor, values: Tensor) -> Tensor:
    """Scale the values [blocks, 8, 32] of Q4_K and Q5_K and subtract the minima."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scaled = (_half(blocks, 0) * scales).unsqueeze(-1) * values.float()
    return (scaled - (_half(blocks, 2) * minima).unsqueeze(-1)).flatten(1)


def _parts_of_nibbles(packed: Tensor) -> Tensor:
    """Return [blocks, 8, 32] from 128 bytes; each 32 hold one part low and the next high."""
    return _nibbles(packed.reshape(-1, _PARTS // 2, 32)).view(-1, _PARTS, 32)


def _q5_k(blocks: Tensor) -> Tensor:
    parts = torch.arange(_PARTS, dtype=torch.uint8).view(1, -1, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> parts) & 1) << 4
    return _by_parts(blocks, _parts_of_nibbles(blocks[:, 48:]) | high)


def _q6_k(blocks: Tensor) -> Tensor:
    """Expand two halves of 128 elements: four rows of 32 share bytes of low and high bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    values = (low | high).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (values * scales.unsqueeze(-1)).flatten(1)


INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K")


def int4_codes(blocks: Tensor, storage: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of one of `INT4_TYPES` as codes: elements are (code - zero) * scale.

    Returns:
        codes: [blocks, elements per block] uint8
        scales, zeros: [blocks, elements / 32] float32
    """
    if storage == "Q4_K":
        codes = _parts_of_nibbles(blocks[:, 16:]).flatten(1)
        scales, minima = _scales_and_minima(blocks[:, 4:16])
        scales, lowest = _half(blocks, 0) * scales, -_half(blocks, 2) * minima
    elif storage == "Q4_1":
        codes, scales, lowest = _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)
    else:
        codes, scales = _nibbles(blocks[:, 2:]), _half(blocks, 0)
        lowest = -8 * scales
    # With a scale of 0 all elements equal the minimum.
    flat = scales == 0
    codes = codes.masked_fill(flat.repeat_interleave(32, 1), 0)
    scales = scales.masked_fill(flat, 1.0)
    return codes, scales, -lowest / scales


def mxfp4_parts(blocks: Tensor) -> Mxfp4Weights:
    """Return MXFP4 blocks in the order of the product: blocks [blocks, 16] and scales [blocks]."""
    values = _nibbles(blocks[:, 1:])
    return Mxfp4Weights(values[:, 0::2] | (values[:, 1::2] << 4), blocks[:, 0])


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16).float(),
    "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
    "Q4_0": lambda blocks: (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0),
    "Q4_1": lambda blocks: _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2),
    "Q8_0": lambda blocks: blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0),
    "Q4_K": lambda blocks: _by_parts(blocks, _parts_of_nibbles(blocks[:, 16:])),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
