"""Weights of 4 or 8 bits in groups along the inputs, each with a scale and a zero point.

Formats: GPTQ and AWQ as written by their packages, and compressed-tensors' `pack-quantized` and
`int-quantized`. Whatever the file's layout, rows here are outputs and columns inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.formats.quantized_scheme import Scheme

Parts = Callable[[str], Tensor | None]
"""Returns a tensor of a weight by the last part of its name, or None."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each column among the eight in a word."""
_ROWS_AT_ONCE = 1 << 20
"""Words unpacked at once, which bounds the memory."""


class BadQuantization(ValueError):
    """The tensors of a quantized weight are inconsistent."""


class IntegerWeight(NamedTuple):
    """One weight [out, in]: (code - zero) * scale."""

    bits: int
    codes: Tensor
    """uint8 or int8 [out, in]."""
    scales: Tensor
    """float32 [out, groups]."""
    zeros: Tensor
    """float32 [out, groups], in units of codes."""
    group_of: Tensor | None
    """int64 [in]: the group of each input; None if groups are of equal size and in order."""

    def rows(self, first: int, last: int) -> Tensor:
        """Return some rows of the weight as float32 [rows, in]."""
        codes = self.codes[first:last].float()
        scales, zeros = self.scales[first:last], self.zeros[first:last]
        if self.group_of is not None:
            return (codes - zeros[:, self.group_of]) * scales[:, self.group_of]
        grouped = codes.view(len(codes), scales.shape[1], -1)
        return ((grouped - zeros.unsqueeze(2)) * scales.unsqueeze(2)).view_as(codes)


def read_gptq(parts: Parts, scheme: Scheme) -> IntegerWeight:
    """Read `qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales`, `g_idx`.

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    packed, scales = _needed(parts, "qweight"), _needed(parts, "scales").float()
    codes = _unpacked(packed.T.contiguous(), scheme.bits)
    zeros = parts("qzeros")
    middle = float(1 << (scheme.bits - 1))
    if zeros is None:
        offsets = torch.full_like(scales, middle)
    else:
        offsets = _unpacked(zeros, scheme.bits).float() + scheme.added_to_zeros
    return _checked(scheme.bits, codes, scales.T, offsets.T, _order(parts("g_idx"), len(scales)))


def read_awq(parts: Parts) -> IntegerWeight:
    """Read `qweight` [in, out / 8], `qzeros` [groups, out / 8] and `scales` [groups, out].

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    codes, zeros = (_in_order(_unpacked(_needed(parts, n), 4)) for n in ("qweight", "qzeros"))
    scales = _needed(parts, "scales").float()
    return _checked(4, codes.T.contiguous(), scales.T, zeros.T.float(), None)


def read_packed(parts: Parts) -> IntegerWeight:
    """Read compressed-tensors' `weight_packed` [out, in * bits / 32], with scales and zero points.

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    packed, scales = _needed(parts, "weight_packed"), _needed(parts, "weight_scale").float()
    num_outputs, num_inputs = (int(size) for size in _needed(parts, "weight_shape"))
    bits = next((b for b in (4, 8) if -(-num_inputs * b // 32) == packed.shape[1]), 0)
    if not bits or len(packed) != num_outputs:
        raise BadQuantization(
            f"weight_packed {list(packed.shape)} holds no {num_outputs} x {num_inputs} weights of "
            "4 or 8 bits"
        )
    codes = _unpacked(packed, bits)[:, :num_inputs]
    zeros = parts("weight_zero_point")
    if zeros is None:
        offsets = torch.full_like(scales, float(1 << (bits - 1)))
    else:  # packed along the outputs
        offsets = _unpacked(zeros.T.contiguous(), bits)[:, :num_outputs].T.float()
    return _checked(bits, codes, scales, offsets, _order(parts("weight_g_idx"), scales.shape[1]))


def read_int8(parts: Parts) -> IntegerWeight:
    """Read an int8 `weight` [out, in] of compressed-tensors, its scales and zero points.

    Raises:
        BadQuantization: the tensors are inconsistent.
    """
    codes = _needed(parts, "weight")
    scales = _needed(parts, "weight_scale").float()
    scales = scales.reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
    scales = scales.expand(len(codes), -1)
    zeros = parts("weight_zero_point")
    offsets = torch.zeros_like(scales) if zeros is None else zeros.float().expand_as(scales)
    return _checked(8, codes, scales, offsets, _order(parts("weight_g_idx"), scales.shape[1]))


def _needed(parts: Parts, name: str) -> Tensor:
    found = parts(name)
    if found is None:
        raise BadQuantization(f"{name} is missing")
    return found


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of 32-bit words [rows, words] as uint8 [rows, words * 32 / bits]."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise BadQuantization(f"packed weights are {words.dtype} {list(words.shape)}")
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = torch.empty(len(words), words.shape[1] * per_word, dtype=torch.uint8)
    at_once = max(1, _ROWS_AT_ONCE // max(1, words.shape[1]))
    for first in range(0, len(words), at_once):
        some = words[first : first + at_once].unsqueeze(2)
        codes[first : first + at_once] = ((some >> shifts) & ((1 << bits) - 1)).flatten(1)
    return codes


def _in_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _order(group_of: Tensor | None, num_groups: int) -> Tensor | None:
    if group_of is None:
        return None
    group_of = group_of.long()
    if group_of.dim() != 1 or bool(((group_of < 0) | (group_of >= num_groups)).any()):
        raise BadQuantization(f"an input's group is not one of the {num_groups}")
    return group_of


def _checked(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None
) -> IntegerWeight:
    num_outputs, num_inputs = codes.shape
    fits = scales.shape == zeros.shape and len(scales) == num_outputs
    if group_of is None:
        fits = fits and scales.shape[1] > 0 and num_inputs % scales.shape[1] == 0
    else:
        fits = fits and len(group_of) == num_inputs
    if not fits:
        raise BadQuantization(
            f"scales {list(scales.shape)} and zero points {list(zeros.shape)} do not fit weights "
            f"{list(codes.shape)}"
        )
    return IntegerWeight(bits, codes, scales.contiguous(), zeros.contiguous(), group_of)
