"""Writes weights in GPTQ, AWQ and FP8 checkpoint formats."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.products.int4 import Int4Weights

IntArray = NDArray[np.int64]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column in each position of a packed word, from the lowest bits."""


class Written(NamedTuple):
    """Tensors of one weight by name suffix, and the dequantized weight."""

    parts: dict[str, Tensor]
    weight: Tensor


def _words(codes: NDArray[Any], bits: int) -> Tensor:
    """Pack the last axis, the first code lowest."""
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint64)
    words = sum(grouped[..., index] << np.uint64(bits * index) for index in range(per_word))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _random(
    num_outputs: int, num_inputs: int, group: int, bits: int, seed: int
) -> tuple[IntArray, IntArray, NDArray[np.float16]]:
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 1 << bits, (num_outputs, num_inputs))
    zeros = draw.integers(1, 1 << bits, (num_outputs, num_inputs // group))
    scales = draw.uniform(0.001, 0.01, zeros.shape).astype(np.float16)
    return codes, zeros, scales


def _weight(
    codes: IntArray, zeros: IntArray, scales: NDArray[np.float16], group_of: IntArray
) -> Tensor:
    values = (codes - zeros[:, group_of]) * scales.astype(np.float32)[:, group_of]
    return torch.from_numpy(values.astype(np.float32))


def dense(weights: Int4Weights) -> Tensor:
    """Dequantize 4-bit codes: [out, in], float32."""
    grouped = weights.codes.float().view(*weights.scales.shape, -1)
    return ((grouped - weights.zeros.unsqueeze(2)) * weights.scales.unsqueeze(2)).flatten(1)


def gptq(
    shape: tuple[int, int], *, bits: int = 4, group: int = 32, version: int = 1, order: str = "",
    seed: int = 0,
) -> Written:  # fmt: skip
    """Write a weight [out, in]; the order of activations is `random`, `plain` or not stored."""
    codes, zeros, scales = _random(*shape, group, bits, seed)
    group_of = np.arange(shape[1]) // group
    if order == "random":
        group_of = np.random.default_rng(seed).permutation(group_of)
    stored_zeros = zeros - 1 if version == 1 else zeros
    parts = {
        "qweight": _words(codes, bits).T.contiguous(),
        "qzeros": _words(stored_zeros.T.copy(), bits),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    if order:
        parts["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return Written(parts, _weight(codes, zeros, scales, group_of))


def awq(shape: tuple[int, int], *, group: int = 32, seed: int = 0) -> Written:
    """Write a weight [out, in] in AWQ's gemm version."""
    codes, zeros, scales = _random(*shape, group, 4, seed)

    def words(rows: NDArray[Any]) -> Tensor:
        return _words(rows.reshape(len(rows), -1, 8)[:, :, AWQ_ORDER].reshape(rows.shape), 4)

    parts = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return Written(parts, _weight(codes, zeros, scales, np.arange(shape[1]) // group))


def fp8(shape: tuple[int, int], *, block: tuple[int, int] | None, seed: int = 0) -> Written:
    """Write a weight [out, in] as 8-bit floats: a scale for each block, or one for all."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.tensor(0.02)
        return Written({"weight": values, "weight_scale": scale}, values.float() * scale)
    counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    scales = torch.rand(counts, generator=generator) + 0.01
    spread = torch.stack(
        [scales[row // block[0]][torch.arange(shape[1]) // block[1]] for row in range(shape[0])]
    )
    return Written({"weight": values, "weight_scale_inv": scales}, values.float() * spread)
