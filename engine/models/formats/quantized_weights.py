"""Which tensors of a checkpoint make up each quantized weight, and its expansion."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.formats.quantized_floats import FloatWeight, read_float8, read_nvfp4
from engine.models.formats.quantized_integers import (
    BadQuantization,
    IntegerWeight,
    read_awq,
    read_gptq,
    read_int8,
    read_packed,
)
from engine.models.formats.quantized_scheme import Scheme
from engine.models.products.mxfp4 import BLOCK
from engine.models.weights import Layout, Shape

_AT_ONCE = 1 << 22
"""Weights expanded at once, which bounds the memory."""

PARTS = (
    "activation_scale",
    "activation_scale_ub",
    "g_idx",
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "qweight",
    "qzeros",
    "scales",
    "weight_g_idx",
    "weight_global_scale",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
)
"""Last name components of a quantized weight's tensors."""
_MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"
"""Name suffixes of the two tensors of a layer's experts."""
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Scales of an 8-bit KV cache, which the engine does not use."""


class StoredWeight(NamedTuple):
    """The tensors that make up a quantized weight."""

    shape: Shape
    names: dict[str, str]
    """Full tensor names by their last components."""


def quantized_weights(
    scheme: Scheme, shapes: Layout, types: Mapping[str, str], read: Callable[[str], Tensor]
) -> dict[str, StoredWeight]:
    """Find a checkpoint's quantized weights, keyed by their unquantized names.

    Args:
        shapes: shapes of all stored tensors.
        types: dtypes of all stored tensors, as named by safetensors.
        read: reads a tensor by name.

    Raises:
        BadQuantization: tensors of one weight are inconsistent.
    """
    if scheme.method == "mxfp4":
        return dict(_mxfp4_weights(shapes, types))
    groups: dict[str, dict[str, str]] = {}
    for name in shapes:
        base, _, part = name.rpartition(".")
        if part in PARTS or (part == "weight" and types[name] in ("F8_E4M3", "F8_E5M2", "I8")):
            groups.setdefault(base, {})[part] = name
    return {
        f"{base}.weight": StoredWeight(_shape(scheme, names, shapes, types, read), names)
        for base, names in groups.items()
    }


def _mxfp4_weights(shapes: Layout, types: Mapping[str, str]) -> Iterator[tuple[str, StoredWeight]]:
    """Yield each layer's stacked experts, with their 16-bit shape."""
    for blocks, shape in shapes.items():
        if not blocks.endswith(_MXFP4_BLOCKS):
            continue
        name = blocks.removesuffix(_MXFP4_BLOCKS)
        scales = name + _MXFP4_SCALES
        fits = len(shape) == 4 and shape[3] == BLOCK // 2 and shapes.get(scales) == shape[:3]
        if not fits or {types[blocks], types[scales]} != {"U8"}:
            raise BadQuantization(f"{blocks} and {scales} are not blocks of 4-bit floats")
        experts, outputs, groups, _ = shape
        stored = {"blocks": blocks, "scales": scales}
        yield name, StoredWeight((experts, groups * BLOCK, outputs), stored)


def _shape(
    scheme: Scheme,
    names: dict[str, str],
    shapes: Layout,
    types: Mapping[str, str],
    read: Callable[[str], Tensor],
) -> Shape:
    if "qweight" in names and "scales" in names:
        num_outputs = shapes[names["scales"]][-1]
        rows = shapes[names["qweight"]][0]
        return num_outputs, rows if scheme.method == "awq" else rows * 32 // scheme.bits
    if "weight_shape" in names:
        rows, columns = (int(size) for size in read(names["weight_shape"]))
        return rows, columns
    if "weight_packed" in names and types[names["weight_packed"]] == "U8":
        rows, columns = shapes[names["weight_packed"]]
        return rows, 2 * columns
    if "weight" in names:
        return shapes[names["weight"]]
    raise BadQuantization(f"there is no weight for {', '.join(sorted(names.values()))}")


def expanded(weight: IntegerWeight | FloatWeight, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a copy of a weight [out, in] as floats."""
    whole = torch.empty(shape, dtype=dtype)
    at_once = max(1, _AT_ONCE // max(1, whole.shape[1]))
    for first in range(0, len(whole), at_once):
        rows = weight.rows(first, min(first + at_once, len(whole)))
        whole[first : first + at_once].copy_(rows)
    return whole


def open_weight(
    weight: StoredWeight, scheme: Scheme, read: Callable[[str], Tensor]
) -> IntegerWeight | FloatWeight:
    """Read the tensors of a weight.

    Raises:
        BadQuantization: they are inconsistent.
    """

    def parts(part: str) -> Tensor | None:
        name = weight.names.get(part)
        return None if name is None else read(name)

    if "qweight" in weight.names:
        return read_awq(parts) if scheme.method == "awq" else read_gptq(parts, scheme)
    if "weight_global_scale" in weight.names:
        return read_nvfp4(parts)
    if "weight_packed" in weight.names:
        return read_packed(parts)
    values = parts("weight")
    if values is not None and values.dtype == torch.int8:
        return read_int8(parts)
    return read_float8(parts, scheme.block)
