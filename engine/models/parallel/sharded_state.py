"""Checkpoints sharded in advance: a file for each process of --tensor-parallel-size.

Files have vLLM's names and hold one process's tensors under the decoder's names. Their metadata
includes the digest of the whole checkpoint, which must be equal in all processes.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.models.formats.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.models.formats.files import CheckpointError, compare
from engine.models.hf_config import read_config, read_spec
from engine.models.parallel.tensors import ShardedCheckpoint, TensorSharding
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.models.weights import Layout, decoder_tensors

_SIZE, _FINGERPRINT = "tensor_parallel_size", "fingerprint"


def _file(directory: Path, rank: int) -> Path:
    return directory / f"model-rank-{rank}-part-0.safetensors"


def save_sharded_state(model: Path, output: Path, size: int) -> list[Path]:
    """Shard a checkpoint for `size` processes and return the files written.

    The model's other files are copied too, so the directory can be served.

    Raises:
        UnsupportedModel: the model cannot be sharded.
        CheckpointError: the weights do not match the config.
        OSError: files cannot be read or written, or the directory exists.
    """
    spec = read_spec(model)
    refused = {
        "quantized weights": "quantization_config" in read_config(model),
        "models with vision encoders": spec.vision is not None,
    }
    for what, applies in refused.items():
        if applies:
            raise UnsupportedModel(f"{model}: {what} cannot be sharded in advance")
    whole = SafetensorsCheckpoint(model, spec)
    fingerprint = whole.fingerprint()
    shardings = [TensorSharding(spec, rank, size) for rank in range(size)]
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("*.safetensors*", ".*"))
    for sharding in shardings:
        part = ShardedCheckpoint(whole, sharding)
        tensors = {name: part.tensor(name).contiguous().clone() for name in decoder_tensors(spec)}
        described = {_SIZE: str(size), _FINGERPRINT: fingerprint}
        save_file(tensors, _file(output, sharding.rank), metadata=described)
    return [_file(output, sharding.rank) for sharding in shardings]


class ShardedState(Checkpoint):
    """One process's part of a sharded checkpoint."""

    def __init__(self, directory: Path, spec: ModelSpec, sharding: TensorSharding) -> None:
        """Open the part and compare it with what the process needs.

        Raises:
            CheckpointError: it is missing, was sharded for another size, or does not match the
                config.
        """
        path = _file(directory, sharding.rank)
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
        except Exception as error:  # the library raises its own type without a public base
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._file = file
        described: dict[str, str] = file.metadata() or {}
        if described.get(_SIZE) != str(sharding.size) or _FINGERPRINT not in described:
            raise CheckpointError(
                f"{path} was sharded for --tensor-parallel-size {described.get(_SIZE, 'unknown')}, "
                f"not for {sharding.size}: run swell save-sharded-state again"
            )
        self._fingerprint = described[_FINGERPRINT]
        found: Layout = {
            name: tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118 - not a dict
        }
        expected = {
            name: tuple(sharding.part(name, torch.empty(shape, device="meta")).shape)
            for name, shape in decoder_tensors(spec).items()
        }
        compare(path, expected, found)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding table."""
        return self.tensor("model.embed_tokens.weight").dtype

    def tensor(self, name: str) -> Tensor:
        """Return this process's part of a tensor, a view of the mapped file."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        """Return the digest of the original checkpoint."""
        return self._fingerprint
