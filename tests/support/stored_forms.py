"""Writes a checkpoint in the quantized formats that Swell reads, rounding to nearest.

Scales are derived from the maximum or the range of each group.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

_GROUP = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Parts = dict[str, Tensor]


def write_checkpoint(
    dense: Path, target: Path, settings: dict[str, Any], write: Callable[[Tensor], Parts]
) -> None:
    """Copy a model directory, replacing each linear layer's weight with the output of `write`."""
    target.mkdir(parents=True, exist_ok=True)
    tensors: Parts = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        base = name.removesuffix("weight")
        tensors |= {base + part: each.contiguous() for part, each in write(tensor.float()).items()}
    config = json.loads((dense / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    for name in _TEXT_FILES:
        if (dense / name).is_file():
            shutil.copyfile(dense / name, target / name)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _fp8_tensor(weight: Tensor) -> Parts:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_channel(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_blocks(weight: Tensor) -> Parts:
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = weight.new_zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = weight / spread[: weight.shape[0], : weight.shape[1]]
    return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _int8_channel(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _packed(weight: Tensor) -> Parts:
    grouped = weight.view(len(weight), -1, _GROUP)
    scales = grouped.abs().amax(2) / 7.5
    codes = (grouped / scales.unsqueeze(2)).round().clamp(-8, 7).view_as(weight) + 8
    return {
        "weight_packed": _words(codes.numpy()),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _gptq(weight: Tensor) -> Parts:
    codes, zeros, scales = _of_range(weight)
    return {
        "qweight": _words(codes.numpy()).T,
        "qzeros": _words((zeros - 1).T.contiguous().numpy()),  # first format: minus one
        "scales": scales.T.to(torch.float16),
    }


def _awq(weight: Tensor) -> Parts:
    codes, zeros, scales = _of_range(weight)

    def words(rows: Tensor) -> Tensor:
        ordered = rows.reshape(len(rows), -1, 8)[:, :, _AWQ_ORDER].reshape(rows.shape)
        return _words(ordered.numpy())

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.half()}


def _of_range(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 4-bit codes, zero points and scales, from the range of each 32 elements."""
    grouped = weight.view(len(weight), -1, _GROUP)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = ((grouped / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15)
    return codes.view_as(weight), zeros, scales


def _words(codes: NDArray[Any]) -> Tensor:
    """Pack 4-bit codes along the last axis, the first one lowest."""
    grouped = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(grouped.shape[:-1], np.uint32)
    for place in range(8):
        words |= grouped[..., place] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Parts]]] = {
    "fp8 per tensor": ({"quant_method": "fp8"}, _fp8_tensor),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_blocks),
    "fp8 per channel": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8_channel,
    ),
    "compressed-tensors W8": (
        _compressed("int-quantized", num_bits=8, strategy="channel"),
        _int8_channel,
    ),
    "compressed-tensors W4A16": (
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=_GROUP),
        _packed,
    ),
    "gptq 4 bits": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP}, _gptq),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm"},
        _awq,
    ),
}
