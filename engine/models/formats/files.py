"""Tensors of safetensors files by their stored names, or seeded random ones instead.

Files are memory-mapped: reading and copying a tensor needs no memory beyond the copy. Digests are
cheap at any size: they cover a sample of every tensor's bytes.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from engine.models.weights import Layout, Shape

_MAX_PROBLEMS = 8
_LENGTH = 32
"""Hexadecimal digits of digests."""
_MAX_DRAWN = 16_777_259
"""Maximum distinct dummy weights per tensor before they repeat: a prime, so that no two rows are
equal."""
_DUMMY_RANGE = 0.035
"""Half-width of the uniform distribution of dummy weights: a standard deviation of 0.02."""
_WHOLE_BYTES = 16 * 2**10
"""Tensors up to this size are hashed completely."""
_CHUNK_BYTES = 256
_APART_BYTES = 2**20
"""Distance between sampled chunks of larger tensors. Sparse, so that processes with a part of a
model do not read the others' parts."""
_MIN_CHUNKS = 4
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class CheckpointError(ValueError):
    """The checkpoint does not contain the tensors that the model's config requires."""


class TensorFiles:
    """One `model.safetensors`, or the shards listed in `model.safetensors.index.json`."""

    def __init__(self, directory: Path) -> None:
        """Open the files.

        Raises:
            CheckpointError: they are missing or cannot be read.
        """
        self.shapes: Layout = {}
        self.types: dict[str, str] = {}
        """Dtypes as named in the files."""
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            with path.open("rb"):  # the library reports every failure as a missing file
                file: Any = safe_open(path, framework="pt", device="cpu")
        except Exception as error:  # the library raises its own type without a public base
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            header = file.get_slice(name)
            self._files[name] = file
            self.shapes[name] = tuple(header.get_shape())
            self.types[name] = header.get_dtype()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as stored, a view of the mapped file."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def float_type(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            CheckpointError: it is not a floating-point dtype that the engine supports.
        """
        stored = self.types[name]
        if stored not in _DTYPES:
            raise CheckpointError(f"weights of type {stored} are not supported")
        return _DTYPES[stored]

    def fingerprint(self, config: bytes) -> str:
        """Return a digest of the config and each tensor's name, shape, dtype and a byte sample."""
        described = {name: f"{shape} {self.types[name]}" for name, shape in self.shapes.items()}
        return weights_fingerprint(config, described, self.tensor)


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint.

    Raises:
        CheckpointError: some are missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        files = [directory / name for name in sorted(set(names))]
    else:
        files = [directory / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {abbreviated(missing)}")
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def compare(
    path: Path, expected: Layout, found: Layout, *, redundant: tuple[str, ...] = ()
) -> None:
    """Check that the found tensors are those of the model.

    Args:
        redundant: name suffixes of derived tensors that some tools store.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [
        f"unexpected {name}"
        for name in found
        if name not in expected and not name.endswith(redundant)
    ]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} do not fit the model's config: {abbreviated(problems)}"
        )


def abbreviated(items: list[str]) -> str:
    """Return the first items as text, and the number of omitted ones."""
    more = len(items) - _MAX_PROBLEMS
    return "; ".join(items[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def random_tensor(name: str, shape: Shape, seed: int, dtype: torch.dtype) -> Tensor:
    """Draw a tensor that depends only on the seed and its name; norm weights are ones."""
    if name.lower().endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    size = prod(shape)
    values = torch.empty(min(size, _MAX_DRAWN), dtype=dtype)
    values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
    if size > _MAX_DRAWN:  # drawing takes a minute for a model of 8 GB
        values = values.repeat(-(-size // _MAX_DRAWN))[:size]
    return values.view(shape)


def random_fingerprint(config: bytes, seed: int, dtype: torch.dtype) -> str:
    """Return a digest of the config, seed and dtype, which determine the drawn weights."""
    return hashlib.sha256(config + f"dummy {seed} {dtype}".encode()).hexdigest()[:_LENGTH]


def weights_fingerprint(
    config: bytes, described: Mapping[str, str], tensor: Callable[[str], Tensor]
) -> str:
    """Return a digest of a model's config and tensors, in hexadecimal.

    Args:
        described: shape and dtype of every tensor, by name.
        tensor: returns a tensor by name, in any dtype.
    """
    digest = hashlib.sha256(config)
    for name in sorted(described):
        digest.update(f"{name} {described[name]};".encode())
        digest.update(_sample(tensor(name)).tobytes())
    return digest.hexdigest()[:_LENGTH]


def computed_fingerprint(checkpoint: str, quantization: str | None) -> str:
    """Return the digest of the weights used for computation, which quantization changes."""
    if quantization is None:
        return checkpoint
    return hashlib.sha256(f"{checkpoint} {quantization}".encode()).hexdigest()[:_LENGTH]


def _sample(tensor: Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if len(flat) <= _WHOLE_BYTES:
        return flat
    chunks = max(_MIN_CHUNKS, len(flat) // _APART_BYTES)
    stride = (len(flat) - _CHUNK_BYTES) // (chunks - 1)
    sampled = np.lib.stride_tricks.as_strided(
        flat[: (chunks - 1) * stride + _CHUNK_BYTES], (chunks, _CHUNK_BYTES), (stride, 1)
    )
    return np.concatenate((sampled.reshape(-1), flat[-_CHUNK_BYTES:]))
