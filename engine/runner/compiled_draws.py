"""Draws from the logits of a model in bfloat16 on a CPU, by a kernel."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.models.kernels.choice import can_compile, trusted
from engine.runner.categorical import DrawFromLogits, FloatArray, draw_from_logits

_SHARED_VALUES = 1 << 17
"""Logits from which on all threads draw: one takes some 20 us for as many."""
_LINE = 16
"""Values of float32 in a cache line."""


@cache
def drawing(dtype: torch.dtype, device: torch.device) -> DrawFromLogits:
    """Return what draws from the logits of a model of this type on this device.

    Whatever it returns draws from float32 in the same way, to which logits are copied before they
    are adjusted.
    """
    replaced = "draws from logits"
    if device.type != "cpu" or not can_compile(dtype, device, replaced):
        return draw_from_logits
    return trusted(_by_kernel, _agrees, replaced) or draw_from_logits


def _by_kernel() -> DrawFromLogits:
    from engine.models.kernels import draws

    def draw(
        logits: Tensor, temperature: FloatArray, uniforms: FloatArray, *, consume: bool = False
    ) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        shares = min(rows, torch.get_num_threads()) if logits.numel() >= _SHARED_VALUES else 1
        chunks = -(-vocab // draws.CHUNK)
        stride = -(-(draws.CHUNK + chunks) // _LINE) * _LINE  # so that no two threads share a line
        scratch = torch.empty(rows, stride, dtype=torch.float32)
        drawn = torch.empty(rows, dtype=torch.int64)
        scales, uniforms = (1 / temperature).astype(np.float32), np.ascontiguousarray(uniforms)
        draws.draw(
            shares,
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

    return draw


def _agrees(draw: DrawFromLogits) -> bool:
    """Compare draws of both types, few enough that none falls between two tokens by rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 300, generator=generator).bfloat16()
    temperature, uniforms = np.array([0.5, 1.0, 2.0]), np.array([0.2, 0.5, 0.8])
    expected = draw_from_logits(logits.float(), temperature, uniforms)
    return all(
        torch.equal(draw(each, temperature, uniforms), expected)
        for each in (logits, logits.float())
    )
