"""Samples one token per row by inverting the cumulative distribution at one uniform number.

The search has two levels, chunks of the vocabulary first, so that only chunk sums are stored per
row, and sums are accumulated in float64. Every operation treats rows independently, so a row's
token does not depend on its neighbours.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runner.slots import FloatArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

UIntArray = npt.NDArray[np.uint64]


def uniform(seeds: UIntArray, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per (seed, position).

    A counter-based generator has no state to carry between steps or engines: a preempted, moved or
    replayed request samples the same numbers again. The function is SplitMix64's output mix
    (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), applied to
    the seed, then to the sum of that and the position times the golden gamma, so that neighbouring
    seeds and neighbouring positions are both unrelated.
    """
    streams = _mix(seeds + _GAMMA)
    bits = _mix(streams + positions.astype(np.uint64) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: UIntArray) -> UIntArray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


_CHUNK = 128
"""Tokens per chunk; divides the vocabularies of most models."""
_CACHED_BYTES = 1 << 20
"""Bytes of weights that each CPU thread processes at once; fits a core's second-level cache."""
_SAFE = 32.0
"""Rows whose largest logit over temperature is at most this in magnitude need no shift: their sums
do not overflow, and every weight that can be sampled is a normal number."""


class DrawFromLogits(Protocol):
    """See `draw_from_logits`."""

    def __call__(
        self,
        logits: Tensor,
        temperature: FloatArray,
        uniforms: FloatArray,
        *,
        consume: bool = False,
    ) -> Tensor:
        """Sample a token per row."""


def draw_from_logits(
    logits: Tensor, temperature: FloatArray, uniforms: FloatArray, *, consume: bool = False
) -> Tensor:
    """Sample from softmax(logits / temperature).

    Args:
        logits: [rows, vocab], of which some may be -inf
        temperature: [rows] above 0
        uniforms: [rows] in [0, 1)
        consume: whether the logits may be overwritten, which saves time in float32

    Returns:
        [rows] token ids
    """
    rows, vocab = logits.shape
    num_chunks = -(-vocab // _CHUNK)
    in_place = consume and logits.dtype == torch.float32 and vocab == num_chunks * _CHUNK
    at_once = rows
    if logits.device.type == "cpu":
        at_once = max(1, min(rows, torch.get_num_threads() * _CACHED_BYTES // (4 * vocab)))
    shift = logits.new_empty(rows, 1, dtype=torch.float32)
    safe = _on_device((_SAFE * temperature).astype(np.float32), logits).unsqueeze(1)
    scale: Tensor | None = None
    if (temperature != 1.0).any():
        scale = _on_device(temperature.astype(np.float32), logits).unsqueeze(1)
    mass = logits.new_empty(rows, num_chunks, dtype=torch.float32)
    if not in_place:  # padding beyond the vocabulary stays zero
        held = logits.new_zeros(at_once, num_chunks * _CHUNK, dtype=torch.float32)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        some = logits[part] if in_place else held[: part.stop - first]
        weights = some[:, :vocab]
        if not in_place:
            weights.copy_(logits[part])
        largest = torch.amax(weights, dim=1, keepdim=True, out=shift[part])
        largest.masked_fill_(largest.abs() <= safe[part], 0.0)
        _exponentiate(weights, shift[part], None if scale is None else scale[part])
        torch.sum(some.view(-1, num_chunks, _CHUNK), dim=2, out=mass[part])

    def weights_of(chunk: Tensor) -> Tensor:
        columns = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device)
        if in_place:
            return logits.gather(1, columns)
        inner = logits.gather(1, columns.clamp(max=vocab - 1)).float()
        return _exponentiate(inner, shift, scale).masked_fill_(columns >= vocab, 0.0)

    return _search(mass, weights_of, uniforms).clamp_(max=vocab - 1)


def _exponentiate(logits: Tensor, shift: Tensor, scale: Tensor | None) -> Tensor:
    """Turn float32 logits into weights, in place; `shift` is zero for rows that need none."""
    if logits.device.type != "cpu" or bool(shift.any()):  # the check would stall a GPU
        logits -= shift
    if scale is not None:
        logits /= scale
    return logits.exp_()


def draw_from_weights(weights: Tensor, uniforms: FloatArray) -> Tensor:
    """Return for each row the token where the cumulative weight passes u times the total.

    Args:
        weights: [rows, vocab] float32, not negative, any positive sum
        uniforms: [rows] in [0, 1)

    Returns:
        [rows] token ids
    """
    vocab = weights.shape[1]
    if vocab % _CHUNK:
        weights = F.pad(weights, (0, _CHUNK - vocab % _CHUNK))
    chunks = weights.view(len(weights), -1, _CHUNK)
    rows = torch.arange(len(weights), device=weights.device)
    found = _search(chunks.sum(dim=-1), lambda chunk: chunks[rows, chunk[:, 0]], uniforms)
    return found.clamp_(max=vocab - 1)


def _search(mass: Tensor, weights_of: Callable[[Tensor], Tensor], uniforms: FloatArray) -> Tensor:
    """Find the chunk, then the token in it; `weights_of` maps [rows, 1] to [rows, chunk]."""
    upto = mass.cumsum(dim=-1, dtype=torch.float64)
    target = upto[:, -1:] * _on_device(uniforms, mass).unsqueeze(1)
    chunk = _first_above(upto, target)
    before = upto.gather(1, chunk) - mass.gather(1, chunk)
    inner = weights_of(chunk).cumsum(dim=-1, dtype=torch.float64)
    return (chunk * _CHUNK + _first_above(inner, target - before))[:, 0]


def _first_above(upto: Tensor, target: Tensor) -> Tensor:
    """Return [rows, 1]: the first index whose sum is above the target, else the last nonzero one.

    The sums of a row without allowed tokens are zero or NaN; any index is acceptable there, but
    those of padding are outside of the vocabulary.
    """
    last = torch.searchsorted(upto, upto[:, -1:].contiguous()).clamp_(max=upto.shape[1] - 1)
    return torch.minimum(torch.searchsorted(upto, target, right=True), last)


def _on_device(values: npt.NDArray[np.floating], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
