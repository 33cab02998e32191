"""The tensors of an encoder's checkpoint, taken by name and shape."""

import hashlib
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from engine.models.formats.checkpoint import CheckpointError, some, weight_files
from engine.models.formats.fingerprint import weights_fingerprint

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DUMMY_RANGE = 0.035


class Tensors(Protocol):
    """Where the tensors of a model come from."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embedding table."""
        ...

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape, whose name is without the model's prefix."""
        ...

    def finish(self, *ignored: str) -> None:
        """Check that nothing is left but what begins in one of these ways."""
        ...

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal weights."""
        ...


class StoredTensors:
    """The tensors of safetensors files."""

    def __init__(self, directory: Path, embedding: str, prefixes: tuple[str, ...]) -> None:
        """Open the files; names may begin with one of `prefixes`.

        Raises:
            CheckpointError: files cannot be read, or there is no embedding table.
        """
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except Exception as error:  # the library raises its own type without a public base
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._files.update({name: file for name in file.keys()})  # noqa: SIM118 - not a dict
        found = [prefix for prefix in ("", *prefixes) if prefix + embedding in self._files]
        if not found:
            raise CheckpointError(f"the weights in {directory} have no {embedding}")
        self._prefix = found[0]
        self._left = set(self._files)
        stored = self._files[self._prefix + embedding].get_slice(self._prefix + embedding)
        kind = stored.get_dtype()
        if kind not in _DTYPES:
            raise CheckpointError(f"weights of type {kind} are not supported")
        self._dtype = _DTYPES[kind]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embedding table."""
        return self._dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; the name may be with or without the model's prefix.

        Raises:
            CheckpointError: it is not there, or has another shape.
        """
        stored = self._prefix + name
        if stored not in self._files:
            stored = name
        if stored not in self._files:
            raise CheckpointError(f"the weights in {self._directory} lack {name}")
        tensor: Tensor = self._files[stored].get_tensor(stored)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"the weights in {self._directory} do not fit the model's config: {stored} has "
                f"shape {list(tensor.shape)} instead of {list(shape)}"
            )
        self._left.discard(stored)
        return tensor

    def finish(self, *ignored: str) -> None:
        """Check that all other tensors' names have one of these prefixes.

        Raises:
            CheckpointError: there is more.
        """
        left = [
            name
            for name in sorted(self._left)
            if not name.removeprefix(self._prefix).startswith(ignored)
        ]
        if left:
            raise CheckpointError(
                f"the weights in {self._directory} do not fit the model's config: unexpected "
                f"{some(left)}"
            )

    def fingerprint(self) -> str:
        """Digest of the config and of name, shape, type and some bytes of every tensor."""
        described = {}
        for name, file in sorted(self._files.items()):
            header = file.get_slice(name)
            described[name] = f"{tuple(header.get_shape())} {header.get_dtype()}"
        config = (self._directory / "config.json").read_bytes()
        return weights_fingerprint(config, described, self._stored)

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class DummyTensors:
    """Random tensors that depend on the seed and on their names only."""

    def __init__(self, directory: Path, seed: int, dtype: torch.dtype) -> None:
        self._config = (directory / "config.json").read_bytes()
        self._seed = seed
        self.dtype = dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """Draw a tensor; norm weights are ones."""
        if name.lower().endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        values = torch.empty(shape, dtype=self.dtype)
        return values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)

    def finish(self, *ignored: str) -> None:
        """There is nothing but what was asked for."""

    def fingerprint(self) -> str:
        """Digest of the config and the seed."""
        digest = hashlib.sha256(self._config + f"dummy {self._seed} {self.dtype}".encode())
        return digest.hexdigest()[:32]
