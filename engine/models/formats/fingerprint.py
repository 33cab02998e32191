"""A digest of weights that costs little whatever their size: some bytes of every tensor."""

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WHOLE_BYTES = 16 * 2**10
"""Tensors up to this size are read whole."""
_CHUNK_BYTES = 256
_APART_BYTES = 2**20
"""A larger one is read in chunks so far apart: processes that hold a part of a model do not read
the others' parts for it."""
_MIN_CHUNKS = 4

_LENGTH = 32


def weights_fingerprint(
    config: bytes, described: Mapping[str, str], tensor: Callable[[str], Tensor]
) -> str:
    """Return a digest of a model's config and tensors, in hexadecimal.

    Args:
        described: shape and type of every tensor, by name.
        tensor: returns one of them, stored as any type.
    """
    digest = hashlib.sha256(config)
    for name in sorted(described):
        digest.update(f"{name} {described[name]};".encode())
        digest.update(_sample(tensor(name)).tobytes())
    return digest.hexdigest()[:_LENGTH]


def computed_fingerprint(checkpoint: str, quantization: str | None) -> str:
    """Return the digest of the weights as computed with: rounded ones have another digest."""
    if quantization is None:
        return checkpoint
    return hashlib.sha256(f"{checkpoint} {quantization}".encode()).hexdigest()[:_LENGTH]


def _sample(tensor: Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if len(flat) <= _WHOLE_BYTES:
        return flat
    chunks = max(_MIN_CHUNKS, len(flat) // _APART_BYTES)
    apart = (len(flat) - _CHUNK_BYTES) // (chunks - 1)
    sampled = np.lib.stride_tricks.as_strided(
        flat[: (chunks - 1) * apart + _CHUNK_BYTES], (chunks, _CHUNK_BYTES), (apart, 1)
    )
    return np.concatenate((sampled.reshape(-1), flat[-_CHUNK_BYTES:]))
