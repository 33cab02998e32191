"""Reads from a config's `quantization_config` how weights are stored.

Activations are computed in the model's dtype, whatever the file specifies for them; this is more
accurate.
"""

from typing import Any, Literal, cast

import msgspec

from engine.models.spec import UnsupportedModel

Method = Literal["awq", "compressed-tensors", "fp8", "gptq", "mxfp4"]

_COMPRESSED_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_AWQ_VERSIONS = ("gemm",)


class Scheme(msgspec.Struct, frozen=True):
    """How a checkpoint's weights are stored, beyond what the tensors themselves show."""

    method: Method
    bits: int = 8
    """Bits of a GPTQ or AWQ weight."""
    added_to_zeros: int = 0
    """1 for GPTQ's first format, which stores zero points minus one."""
    block: tuple[int, int] | None = None
    """Rows and columns per scale, if both are more than one."""


def read_scheme(config: dict[str, Any]) -> Scheme | None:
    """Return how a model's weights are stored; None if they are plain floats.

    Raises:
        UnsupportedModel: the storage scheme is not supported.
    """
    stored = config.get("quantization_config") or config.get("compression_config")
    if not stored:
        return None
    if not isinstance(stored, dict):
        raise UnsupportedModel("quantization_config is not an object")
    method = stored.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return Scheme("fp8", block=_block(stored.get("weight_block_size")))
    if method == "gptq":
        form = stored.get("checkpoint_format") or "gptq"
        _one_of("checkpoint_format", form, _GPTQ_FORMATS)
        _one_of("bits", stored.get("bits"), (4, 8))
        return Scheme("gptq", stored["bits"], added_to_zeros=1 if form == "gptq" else 0)
    if method == "awq":
        _one_of("version", str(stored.get("version") or "gemm").lower(), _AWQ_VERSIONS)
        _one_of("bits", stored.get("bits", stored.get("w_bit")), (4,))
        _one_of("zero_point", stored.get("zero_point", True), (True,))
        return Scheme("awq", 4)
    if method == "mxfp4":
        return Scheme("mxfp4")
    if method == "compressed-tensors":
        return _compressed(stored)
    raise UnsupportedModel(
        f"the checkpoint is quantized ({method}), which is not supported: use gptq, awq, fp8, "
        "mxfp4 or compressed-tensors, or the original bfloat16, float16 or float32 weights"
    )


def _compressed(stored: dict[str, Any]) -> Scheme:
    form = stored.get("format") or "dense"
    _one_of("format", form, _COMPRESSED_FORMATS)
    sparsity = (stored.get("sparsity_config") or {}).get("format") or "dense"
    _one_of("sparsity_config.format", sparsity, ("dense",))
    if (stored.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel(
            "quantization_config.transform_config: rotations of activations are not supported"
        )
    groups = cast("dict[str, Any]", stored.get("config_groups") or {}).values()
    blocks = {
        _block(weights.get("block_structure"))
        for weights in (group.get("weights") or {} for group in groups)
    } - {None}
    if len(blocks) > 1:
        raise UnsupportedModel(f"quantization_config has several block_structures: {blocks}")
    return Scheme("compressed-tensors", block=blocks.pop() if blocks else None)


def _one_of(key: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UnsupportedModel(
            f"quantization_config.{key} is {value!r}; supported: {', '.join(map(str, known))}"
        )


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) for n in value):
        rows, columns = value
        if rows > 0 and columns > 0:
            return rows, columns
    raise UnsupportedModel(f"a block of weights is not a pair of positive numbers: {value!r}")
