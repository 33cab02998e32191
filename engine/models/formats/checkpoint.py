"""Where a decoder's tensors come from: a safetensors checkpoint, or a seeded random one.

A checkpoint is compared with the names and shapes that the model needs before anything is read,
so that a wrong or incomplete one is refused at once with everything that is wrong with it.
Files are memory-mapped: a tensor that is fetched and copied costs no memory beyond its copy.
"""

import hashlib
import zlib
from math import prod
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from engine.models.families.registry import family_of
from engine.models.formats.fingerprint import weights_fingerprint
from engine.models.formats.quantized.floats import FloatWeight
from engine.models.formats.quantized.integers import BadQuantization, IntegerWeight
from engine.models.formats.quantized.scheme import read_scheme
from engine.models.formats.quantized.weights import (
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

_MAX_PROBLEMS = 8
MAX_DRAFT_LAYERS = 8
_MAX_DRAWN = 16_777_259
"""Dummy weights of a tensor that are drawn, before they repeat themselves: a prime, so that no two
rows are alike."""
_DUMMY_RANGE = 0.035
"""Half-width of the uniform distribution of dummy weights: a standard deviation of 0.02."""


class CheckpointError(ValueError):
    """The checkpoint does not hold the tensors that the model's config asks for."""


class Checkpoint(Protocol):
    """Tensors on the CPU, by the decoder's names (`engine.models.weights`)."""

    @property
    def dtype(self) -> torch.dtype:
        """The type that most of the tensors are stored in."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one tensor; it may be a view of a mapped file, so copy what is kept."""
        ...

    def int4(self, name: str) -> Int4Weights | None:
        """Return a weight as it is stored in 4 bits; None if it is not, or not in plain groups."""
        ...

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return a weight as it is stored in blocks of 4-bit floats; None if it is not."""
        ...

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal weights."""
        ...


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class SafetensorsCheckpoint:
    """One `model.safetensors`, or the shards that `model.safetensors.index.json` lists."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        *,
        extra: Layout | None = None,
        optional: Layout | None = None,
    ) -> None:
        """Open the files and compare their tensors with what the model needs.

        Args:
            directory: of the checkpoint.
            spec: of the model.
            extra: tensors that are needed besides, by their names there.
            optional: the same of tensors that may be there.

        Raises:
            CheckpointError: files or tensors are missing, unexpected or of another shape.
        """
        self._config = (directory / "config.json").read_bytes()
        self._files: dict[str, Any] = {}
        self._shapes: Layout = {}
        self._stored: dict[str, str] = {}
        for path in weight_files(directory):
            self._open(path)
        self._scheme = read_scheme(msgspec.json.decode(self._config))
        shapes = self._find_quantized(directory)
        family = family_of(spec.architecture)
        weights = family.weights(spec) | _as_stored({**(extra or {}), **(optional or {})})
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
        """Find the weights that are stored in parts; return the shapes of all that are whole."""
        self._quantized: dict[str, StoredWeight] = {}
        if self._scheme is None:
            return self._shapes
        try:
            self._quantized = quantized_weights(
                self._scheme, self._shapes, self._stored, self._stored_tensor
            )
        except BadQuantization as error:
            raise CheckpointError(f"the quantized weights in {directory}: {error}") from error
        parts = {name for weight in self._quantized.values() for name in weight.names.values()}
        shapes = {name: shape for name, shape in self._shapes.items() if name not in parts}
        return shapes | {name: weight.shape for name, weight in self._quantized.items()}

    def _redundant(self, spec: ModelSpec, expected: Layout) -> tuple[str, ...]:
        """Return the endings of names of tensors that may be there and are not needed."""
        redundant: tuple[str, ...] = (".rotary_emb.inv_freq",)
        if spec.tie_word_embeddings or spec.num_outputs is not None:
            redundant += ("lm_head.weight",)
        if self._scheme is not None:
            biases = [name.removesuffix("weight") + "bias" for name in self._quantized]
            redundant += CACHE_SCALES + tuple(
                name
                for name in biases  # some tools add one of zeros to each
                if name in self._shapes
                and name not in expected
                and not self._stored_tensor(name).any()
            )
        return redundant

    def _open(self, path: Path) -> None:
        try:
            with path.open("rb"):  # the library says of every failure that there is no such file
                file: Any = safe_open(path, framework="pt", device="cpu")
        except Exception as error:  # the library raises its own type without a public base
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            header = file.get_slice(name)
            self._files[name] = file
            self._shapes[name] = tuple(header.get_shape())
            self._stored[name] = header.get_dtype()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embedding table.

        Raises:
            CheckpointError: it is not a floating-point type that the engine computes in.
        """
        stored = self._stored[self._weights["model.embed_tokens.weight"].name]
        if stored not in _DTYPES:
            raise CheckpointError(f"weights of type {stored} are not supported")
        return _DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor backed by the mapped file, where it is stored as the decoder has it.

        Raises:
            CheckpointError: the tensors of a quantized weight do not fit each other.
        """
        packed = self.mxfp4(name)
        if packed is not None:  # of all experts of a layer in one tensor only this one is expanded
            return packed.expanded(self.dtype)
        source = self._weights[name]
        return source.read(self._whole(source.name))

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return the stored blocks and scales of a weight, if it has such; views where possible."""
        source = self._weights[name]
        stored = self._quantized.get(source.name)
        if stored is None or "blocks" not in stored.names:
            return None
        whole = (self._stored_tensor(stored.names[part]) for part in ("blocks", "scales"))
        return Mxfp4Weights(*(source.rows(part[source.index]) for part in whole))

    def int4(self, name: str) -> Int4Weights | None:
        """Return the stored codes, scales and zero points of a weight, if they have 4 bits.

        Raises:
            CheckpointError: its tensors do not fit each other.
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
            return open_weight(self._quantized[name], self._scheme, self._stored_tensor)
        except BadQuantization as error:
            raise CheckpointError(f"{name}: {error}") from error

    def _whole(self, name: str) -> Tensor:
        if name not in self._quantized:
            return self._stored_tensor(name)
        return expanded(self._opened(name), self._quantized[name].shape, self.dtype)

    def _stored_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._weights

    def fingerprint(self) -> str:
        """Digest of the config and of name, shape, type and some bytes of every tensor."""
        described = {name: f"{shape} {self._stored[name]}" for name, shape in self._shapes.items()}
        return weights_fingerprint(self._config, described, self._stored_tensor)


def _as_stored(layout: Layout) -> WeightMap:
    """Return where tensors are that have the checkpoint's names."""
    return {name: Source(name=name, shape=shape) for name, shape in layout.items()}


def _with_prefix(weights: WeightMap, prefixes: tuple[str, ...], found: Layout) -> WeightMap:
    """Return where the tensors of the text model are, which may be a part of a larger one."""
    _, embedding = weights["model.embed_tokens.weight"].name.split(".", 1)
    used = next((prefix for prefix in prefixes if prefix + embedding in found), prefixes[0])

    def placed(source: Source) -> Source:
        name = source.name
        if name.startswith("model."):
            name = used + name.removeprefix("model.")
        elif name not in found:  # the head lies beside the model, wherever that is
            name = used.removesuffix("model.") + name
        return msgspec.structs.replace(source, name=name)

    return {name: placed(source) for name, source in weights.items()}


def weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        files = [directory / name for name in sorted(set(names))]
    else:
        files = [directory / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {some(missing)}")
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def compare(
    path: Path, expected: Layout, found: Layout, *, redundant: tuple[str, ...] = ()
) -> None:
    """Refuse weights that are not those of the model.

    Args:
        redundant: endings of names of tensors that some tools store although they follow from
            others.

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
            f"the weights in {path} do not fit the model's config: {some(problems)}"
        )


def some(items: list[str]) -> str:
    more = len(items) - _MAX_PROBLEMS
    return "; ".join(items[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


class DummyCheckpoint:
    """Random weights that depend on the seed and on each tensor's name only."""

    def __init__(self, directory: Path, spec: ModelSpec, seed: int, dtype: torch.dtype) -> None:
        self._config = (directory / "config.json").read_bytes()
        self._layout = decoder_tensors(spec)
        self._seed = seed
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights are drawn in."""
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        """Draw one tensor; norm weights are ones."""
        shape = self._layout[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        size = prod(shape)
        values = torch.empty(min(size, _MAX_DRAWN), dtype=self._dtype)
        values.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
        if size > _MAX_DRAWN:  # drawing takes a minute for a model of 8 GB
            values = values.repeat(-(-size // _MAX_DRAWN))[:size]
        return values.view(shape)

    def int4(self, name: str) -> Int4Weights | None:
        """None: weights are drawn as floats."""
        return None

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """None: weights are drawn as floats."""
        return None

    def fingerprint(self) -> str:
        """Digest of the config and the seed."""
        digest = hashlib.sha256(self._config + f"dummy {self._seed} {self._dtype}".encode())
        return digest.hexdigest()[:32]
