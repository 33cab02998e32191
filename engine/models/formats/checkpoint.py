"""Sources of a decoder's tensors: a safetensors checkpoint, or seeded random weights.

A checkpoint's names and shapes are compared with what the model needs before any tensor is read, so
a wrong or incomplete one is refused at once, with all problems listed.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.models.families.registry import family_of
from engine.models.formats.files import (
    CheckpointError,
    TensorFiles,
    compare,
    random_fingerprint,
    random_tensor,
)
from engine.models.formats.quantized_floats import FloatWeight
from engine.models.formats.quantized_integers import BadQuantization, IntegerWeight
from engine.models.formats.quantized_scheme import read_scheme
from engine.models.formats.quantized_weights import (
    CACHE_SCALES,
    StoredWeight,
    expanded,
    open_weight,
    quantized_weights,
)
from engine.models.products.int4 import Int4Weights
from engine.models.products.mxfp4 import Mxfp4Weights
from engine.models.spec import ModelSpec
from engine.models.weights import Layout, Source, WeightMap, decoder_tensors, stored_tensors

MAX_DRAFT_LAYERS = 8


class Checkpoint(ABC):
    """Tensors on the CPU, by the decoder's names (`engine.models.weights`)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype that most of the tensors are stored in."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return one tensor, possibly a view of a mapped file: copy it to keep it."""

    def int4(self, name: str) -> Int4Weights | None:
        """Return a weight stored in 4 bits; None if it is not, or not in plain groups."""
        return None

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return a weight stored in blocks of 4-bit floats; None if it is not."""
        return None

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal weights; empty if they cannot affect tokens."""
        return ""


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of safetensors files, including quantized weights."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        *,
        extra: Layout | None = None,
        optional: Layout | None = None,
        files: TensorFiles | None = None,
    ) -> None:
        """Open the files and compare their tensors with what the model needs.

        Args:
            directory: the checkpoint.
            files: files with the tensors; default: the directory's.
            spec: the model.
            extra: additional required tensors, by their stored names.
            optional: additional optional tensors, by their stored names.

        Raises:
            CheckpointError: files or tensors are missing, unexpected or of another shape.
        """
        self._config = (directory / "config.json").read_bytes()
        self._files = files or TensorFiles(directory)
        self._scheme = read_scheme(msgspec.json.decode(self._config))
        shapes = self._find_quantized(directory)
        family = family_of(spec.architecture)
        besides = {**(extra or {}), **(optional or {})}
        added = {name: Source(name=name, shape=shape) for name, shape in besides.items()}
        weights = {**family.weights(spec), **added}
        self._weights = _with_prefix(weights, family.text_prefixes, shapes)
        for name in optional or {}:
            if self._weights[name].name not in shapes:
                del self._weights[name]
        ignored = family.not_text
        if family.has_draft_layers:
            ignored += tuple(
                f"model.layers.{spec.num_layers + i}." for i in range(MAX_DRAFT_LAYERS)
            )
        found = {name: shape for name, shape in shapes.items() if not name.startswith(ignored)}
        expected = stored_tensors(self._weights)
        compare(directory, expected, found, redundant=self._redundant(spec, expected))

    def _find_quantized(self, directory: Path) -> Layout:
        """Find the quantized weights; return the shapes of all weights, unquantized."""
        self._quantized: dict[str, StoredWeight] = {}
        if self._scheme is None:
            return self._files.shapes
        try:
            self._quantized = quantized_weights(
                self._scheme, self._files.shapes, self._files.types, self._files.tensor
            )
        except BadQuantization as error:
            raise CheckpointError(f"the quantized weights in {directory}: {error}") from error
        parts = {name for weight in self._quantized.values() for name in weight.names.values()}
        shapes = {name: shape for name, shape in self._files.shapes.items() if name not in parts}
        return shapes | {name: weight.shape for name, weight in self._quantized.items()}

    def _redundant(self, spec: ModelSpec, expected: Layout) -> tuple[str, ...]:
        """Return name suffixes of tensors that may be present but are not needed."""
        redundant: tuple[str, ...] = (".rotary_emb.inv_freq",)
        if spec.tie_word_embeddings or spec.num_outputs is not None:
            redundant += ("lm_head.weight",)
        if self._scheme is not None:
            biases = [name.removesuffix("weight") + "bias" for name in self._quantized]
            redundant += CACHE_SCALES + tuple(
                name
                for name in biases  # some tools add zero biases
                if name in self._files.shapes
                and name not in expected
                and not self._files.tensor(name).any()
            )
        return redundant

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding table.

        Raises:
            CheckpointError: it is not a floating-point dtype that the engine supports.
        """
        return self._files.float_type(self._weights["model.embed_tokens.weight"].name)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, as a view of the mapped file if it is stored in the decoder's layout.

        Raises:
            CheckpointError: the tensors of a quantized weight are inconsistent.
        """
        packed = self.mxfp4(name)
        if packed is not None:  # expands only one of a layer's stacked experts
            return packed.expanded(self.dtype)
        source = self._weights[name]
        return source.read(self._whole(source.name))

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return a weight's MXFP4 blocks and scales, as views if possible; None if not MXFP4."""
        source = self._weights[name]
        stored = self._quantized.get(source.name)
        if stored is None or "blocks" not in stored.names:
            return None
        whole = (self._files.tensor(stored.names[part]) for part in ("blocks", "scales"))
        return Mxfp4Weights(*(source.rows(part[source.index]) for part in whole))

    def int4(self, name: str) -> Int4Weights | None:
        """Return the stored codes, scales and zero points of a 4-bit weight, else None.

        Raises:
            CheckpointError: its tensors are inconsistent.
        """
        source = self._weights[name]
        if source.name not in self._quantized or self.mxfp4(name) is not None:
            return None
        weights = self._opened(source.name)
        if isinstance(weights, FloatWeight) or weights.bits != 4 or weights.group_of is not None:
            return None
        parts = (weights.codes, weights.scales, weights.zeros)
        codes, scales, zeros = (source.read(part) for part in parts)
        return Int4Weights(codes, scales, zeros)

    def _opened(self, name: str) -> IntegerWeight | FloatWeight:
        assert self._scheme is not None
        try:
            return open_weight(self._quantized[name], self._scheme, self._files.tensor)
        except BadQuantization as error:
            raise CheckpointError(f"{name}: {error}") from error

    def _whole(self, name: str) -> Tensor:
        if name not in self._quantized:
            return self._files.tensor(name)
        return expanded(self._opened(name), self._quantized[name].shape, self.dtype)

    def has(self, name: str) -> bool:
        """Return whether a tensor exists."""
        return name in self._weights

    def fingerprint(self) -> str:
        """Return a digest of the config and each tensor's name, shape, dtype and a byte sample."""
        return self._files.fingerprint(self._config)


def _with_prefix(weights: WeightMap, prefixes: tuple[str, ...], found: Layout) -> WeightMap:
    """Return the locations of the text model's tensors, which can be part of a larger model."""
    _, embedding = weights["model.embed_tokens.weight"].name.split(".", 1)
    used = next((prefix for prefix in prefixes if prefix + embedding in found), prefixes[0])

    def placed(source: Source) -> Source:
        name = source.name
        if name.startswith("model."):
            name = used + name.removeprefix("model.")
        elif name not in found:  # the LM head is beside the model, whatever its prefix
            name = used.removesuffix("model.") + name
        return msgspec.structs.replace(source, name=name)

    return {name: placed(source) for name, source in weights.items()}


class DummyCheckpoint(Checkpoint):
    """Random weights that depend only on the seed and on each tensor's name."""

    def __init__(self, directory: Path, spec: ModelSpec, seed: int, dtype: torch.dtype) -> None:
        self._config = (directory / "config.json").read_bytes()
        self._layout = decoder_tensors(spec)
        self._seed = seed
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weights are drawn in."""
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        """Draw one tensor; norm weights are ones."""
        return random_tensor(name, self._layout[name], self._seed, self._dtype)

    def fingerprint(self) -> str:
        """Return a digest of the config, seed and dtype."""
        return random_fingerprint(self._config, self._seed, self._dtype)
