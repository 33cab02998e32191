"""Sampling from bfloat16 logits on a CPU with compiled kernels."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.registry import compiled_for_cpu
from engine.runner.filters import WITH_TORCH, Drawing, Filters, draw_filtered
from engine.runner.slots import FloatArray

_LINE = 16
"""Float32 values per cache line."""


@cache
def drawing_for(dtype: torch.dtype, device: torch.device) -> Drawing:
    """Return the sampling functions for a model's dtype and device.

    All of them also sample from float32 in the same way, since adjusted logits are copied to
    float32.
    """
    return compiled_for_cpu(
        WITH_TORCH, _by_kernels, _agree, "draws from logits", dtype=dtype, device=device
    )


def _by_kernels() -> Drawing:
    from engine.kernels.cpu import draws, filtered_draws
    from engine.kernels.cpu.logits import threads_for_logits

    def draw(
        logits: Tensor, temperature: FloatArray, uniforms: FloatArray, *, consume: bool = False
    ) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        chunks = -(-vocab // draws.CHUNK)
        stride = _whole_lines(draws.CHUNK + chunks)
        scratch = torch.empty(rows, stride, dtype=torch.float32)
        drawn = torch.empty(rows, dtype=torch.int64)
        scales, uniforms = (1 / temperature).astype(np.float32), np.ascontiguousarray(uniforms)
        draws.draw(
            threads_for_logits(logits),
            logits.data_ptr(),
            int(logits.dtype == torch.float32),
            scales.ctypes.data,
            uniforms.ctypes.data,
            drawn.data_ptr(),
            scratch.data_ptr(),
            stride,
            rows,
            vocab,
        )
        return drawn

    def draw_among(
        logits: Tensor, temperature: FloatArray, filters: Filters, uniforms: FloatArray
    ) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        shares = threads_for_logits(logits)
        stride = _whole_lines(filtered_draws.scratch_size(vocab))
        scratch = torch.empty(shares, stride, dtype=torch.float32)
        drawn = torch.empty(rows, dtype=torch.int64)
        with np.errstate(divide="ignore"):  # without min-p the minimum logit is -inf
            depths = -temperature * np.log(filters.min_p)
        arrays: tuple[npt.NDArray[Any], ...] = (
            (1 / temperature).astype(np.float32),
            np.ascontiguousarray(uniforms),
            np.ascontiguousarray(filters.top_k),
            np.ascontiguousarray(filters.top_p),
            depths.astype(np.float32),
        )
        filtered_draws.draw(
            shares,
            logits.data_ptr(),
            int(logits.dtype == torch.float32),
            rows,
            vocab,
            *(each.ctypes.data for each in arrays),
            drawn.data_ptr(),
            scratch.data_ptr(),
            stride,
        )
        others = np.flatnonzero(drawn.numpy() < 0)
        if len(others):
            index = torch.from_numpy(others)
            drawn[index] = draw_filtered(
                logits[index], temperature[others], filters.of(others), uniforms[others]
            )
        return drawn

    return Drawing(draw, draw_among)


def _whole_lines(values: int) -> int:
    """Round up to whole cache lines, to avoid false sharing between threads."""
    return -(-values // _LINE) * _LINE


def _agree(drawing: Drawing) -> bool:
    """Compare samples for both dtypes; inputs are chosen so that rounding does not matter."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 300, generator=generator).bfloat16()
    temperature, uniforms = np.array([0.5, 1.0, 2.0]), np.array([0.2, 0.5, 0.8])
    filters = Filters(np.array([0, 20, 0]), np.array([0.9, 0.8, 1.0]), np.array([0.0, 0.0, 0.1]))

    def draws(drawing: Drawing, logits: Tensor) -> list[int]:
        unfiltered = drawing.unfiltered(logits, temperature, uniforms)
        filtered = drawing.filtered(logits, temperature, filters, uniforms)
        return [*unfiltered.tolist(), *filtered.tolist()]

    expected = draws(WITH_TORCH, logits.float())
    return all(draws(drawing, each) == expected for each in (logits, logits.float()))
