"""The tensors of an encoder's checkpoint, read by name and shape."""

from pathlib import Path

import torch
from torch import Tensor

from engine.models.formats.files import (
    CheckpointError,
    TensorFiles,
    abbreviated,
    random_fingerprint,
    random_tensor,
)


class StoredTensors:
    """The tensors of safetensors files."""

    def __init__(self, directory: Path, embedding: str, prefixes: tuple[str, ...]) -> None:
        """Open the files; names can have one of `prefixes`.

        Raises:
            CheckpointError: files cannot be read, or there is no embedding table.
        """
        self._directory = directory
        self._files = TensorFiles(directory)
        found = [prefix for prefix in ("", *prefixes) if prefix + embedding in self._files.shapes]
        if not found:
            raise CheckpointError(f"the weights in {directory} have no {embedding}")
        self._prefix = found[0]
        self._starts = (self._prefix, "", *prefixes)
        self._left = set(self._files.shapes)
        self._dtype = self._files.float_type(self._prefix + embedding)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding table."""
        return self._dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; the stored name can have the model's prefix, none, or another one.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        names = (start + name for start in self._starts)
        stored = next((each for each in names if each in self._files.shapes), None)
        if stored is None:
            raise CheckpointError(f"the weights in {self._directory} lack {name}")
        found = self._files.shapes[stored]
        if found != shape:
            raise CheckpointError(
                f"the weights in {self._directory} do not fit the model's config: {stored} has "
                f"shape {list(found)} instead of {list(shape)}"
            )
        self._left.discard(stored)
        return self._files.tensor(stored)

    def finish(self, *ignored: str) -> None:
        """Check that the names of all tensors not taken have one of these prefixes.

        Raises:
            CheckpointError: there are others.
        """
        unread = [
            name
            for name in sorted(self._left)
            if not name.removeprefix(self._prefix).startswith(ignored)
        ]
        if unread:
            raise CheckpointError(
                f"the weights in {self._directory} do not fit the model's config: unexpected "
                f"{abbreviated(unread)}"
            )

    def fingerprint(self) -> str:
        """Return a digest of the config and each tensor's name, shape, dtype and a byte sample."""
        return self._files.fingerprint((self._directory / "config.json").read_bytes())


class DummyTensors:
    """Random tensors that depend only on the seed and on their names."""

    def __init__(self, directory: Path, seed: int, dtype: torch.dtype) -> None:
        self._config = (directory / "config.json").read_bytes()
        self._seed = seed
        self.dtype = dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """Draw a tensor; norm weights are ones."""
        return random_tensor(name, shape, self._seed, self.dtype)

    def finish(self, *ignored: str) -> None:
        """Do nothing: no tensors exist but those taken."""

    def fingerprint(self) -> str:
        """Return a digest of the config, seed and dtype."""
        return random_fingerprint(self._config, self._seed, self.dtype)


Tensors = StoredTensors | DummyTensors
"""Sources of a model's tensors."""
