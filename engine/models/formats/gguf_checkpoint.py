"""A GGUF file as a checkpoint: tensors by the decoder's names, expanded on request."""

from math import prod
from pathlib import Path

import gguf
import msgspec
import torch
from torch import Tensor

from engine.models.families.registry import family_of
from engine.models.formats.checkpoint import MAX_DRAFT_LAYERS, Checkpoint
from engine.models.formats.files import compare, weights_fingerprint
from engine.models.formats.gguf_expansion import INT4_TYPES, expand, int4_codes, mxfp4_parts
from engine.models.products.int4 import Int4Weights
from engine.models.products.mxfp4 import Mxfp4Weights
from engine.models.spec import LatentSpec, ModelSpec, RopeSpec
from engine.models.weights import (
    Layout,
    Shape,
    Source,
    WeightMap,
    decoder_tensors,
    rotated_order,
    stored_tensors,
)
from engine.shared.gguf.reader import TensorInfo, read_gguf

_AT_ONCE = 1 << 22
"""Elements expanded at once, which bounds the memory."""

_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that were read with the config."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PAIRED = ("llama", "granite", "granitemoe", "mistral3", "smollm3")
"""Architectures whose GGUF files store rotated dimensions of queries and keys as adjacent pairs,
unlike other formats."""
_KEYS, _VALUES = "attn_k_b", "attn_v_b"
"""Tensors that together hold DeepSeek's `kv_b_proj`."""


class GgufCheckpoint(Checkpoint):
    """The tensors of one memory-mapped file."""

    def __init__(self, path: Path, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        """Compare the file's tensors with what the model needs.

        Args:
            dtype: dtype of expanded tensors; default: that of the embeddings, or bfloat16 if they
                are quantized.

        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape.
            BadGguf: the file is malformed.
        """
        file = read_gguf(path)
        self._digest = file.digest
        self._spec = spec
        self._infos = {name: _plain(name, info) for name, info in file.tensors.items()}
        self._weights = _sources(spec, file.metadata["general.architecture"])
        draft_layers = tuple(f"blk.{spec.num_layers + i}." for i in range(MAX_DRAFT_LAYERS))
        found = {
            name: info.shape
            for name, info in self._infos.items()
            if name not in _NOT_WEIGHTS and not name.startswith(draft_layers)
        }
        expected = stored_tensors(self._weights)
        if spec.latent is not None and f"blk.0.{_KEYS}.weight" in found:
            expected = _divided(expected, spec.num_heads, spec.latent)
        compare(path, expected, found)
        self._bytes = torch.from_file(
            str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
        )
        stored = self._infos["token_embd.weight"].storage.name
        self._dtype = dtype or _FLOATS.get(stored, torch.bfloat16)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that tensors are expanded to."""
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        """Return a copy of a tensor of the decoder."""
        source = self._weights[name]
        if source.name not in self._infos:
            return self._latent_product(source.name)
        source, info = self._found(name)
        if self._spec.norm.adds_one and source.is_norm:
            return source.read(self._expanded(info, torch.float32)) - 1
        return source.read(self._expanded(info, self._dtype))

    def _latent_product(self, name: str) -> Tensor:
        """Return the projection [outputs, rank] of latents to keys and values of all heads."""
        keys, values = (
            self._expanded(self._infos[name.replace("attn_kv_b", part)], self._dtype)
            for part in (_KEYS, _VALUES)
        )
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

    def int4(self, name: str) -> Int4Weights | None:
        """Return the codes, scales and zero points of a 4-bit weight, else None."""
        if self._weights[name].name not in self._infos:
            return None
        source, info = self._found(name)
        if info.storage.name not in INT4_TYPES:
            return None
        rows = info.shape[0]
        parts = int4_codes(self._blocks(info), info.storage.name)
        codes, scales, zeros = (source.read(part.reshape(rows, -1)) for part in parts)
        return Int4Weights(codes, scales, zeros)

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """Return the blocks and scales of an MXFP4 weight, else None."""
        if self._weights[name].name not in self._infos:
            return None
        _, info = self._found(name)
        if info.storage.name != "MXFP4":
            return None
        parts = mxfp4_parts(self._blocks(info))
        rows = info.shape[0]
        return Mxfp4Weights(parts.blocks.view(rows, -1, 16), parts.scales.view(rows, -1))

    def _found(self, name: str) -> tuple[Source, TensorInfo]:
        """Return a tensor's location; of a stack, only the requested slice is read."""
        source = self._weights[name]
        info = self._infos[source.name]
        if source.index is None:
            return source, info
        one = msgspec.structs.replace(info, shape=info.shape[1:])
        first = info.offset + source.index * one.num_bytes
        unindexed = msgspec.structs.replace(source, index=None, shape=one.shape)
        return unindexed, msgspec.structs.replace(one, offset=first)

    def _blocks(self, info: TensorInfo) -> Tensor:
        return self._stored(info).view(-1, info.storage.num_bytes)

    def fingerprint(self) -> str:
        """Return a digest of the metadata and a sample of every tensor's bytes."""
        described = {
            name: f"{info.shape} {info.storage.name}" for name, info in self._infos.items()
        }
        return weights_fingerprint(
            self._digest.encode(), described, lambda name: self._stored(self._infos[name])
        )

    def _stored(self, info: TensorInfo) -> Tensor:
        return self._bytes[info.offset : info.offset + info.num_bytes]

    def _expanded(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        elements = info.storage.elements
        blocks = self._blocks(info)
        expanded = torch.empty(prod(info.shape), dtype=dtype)
        at_once = _AT_ONCE // elements
        for first in range(0, len(blocks), at_once):
            part = blocks[first : first + at_once].clone()  # aligned, unlike the file
            values = expand(part, info.storage.name).flatten()
            expanded[first * elements : first * elements + len(values)].copy_(values)
        return expanded.view(info.shape)


def _plain(name: str, info: TensorInfo) -> TensorInfo:
    """Flatten ERNIE's router corrections, which are stored as matrices of one row."""
    if name.endswith(".bias") and len(info.shape) == 2 and info.shape[0] == 1:
        return msgspec.structs.replace(info, shape=info.shape[1:])
    return info


def _divided(expected: Layout, heads: int, latent: LatentSpec) -> Layout:
    """Return the expected tensors if a file stores latent keys and values separately."""
    divided: Layout = {}
    for name, shape in expected.items():
        if ".attn_kv_b." not in name:
            divided[name] = shape
            continue
        divided[name.replace("attn_kv_b", _KEYS)] = (heads, latent.rank, latent.plain_size)
        divided[name.replace("attn_kv_b", _VALUES)] = (heads, latent.value_size, latent.rank)
    return divided


def _sources(spec: ModelSpec, kind: str) -> WeightMap:
    """Locate the decoder's tensors: as in the family's map except for names and stacks."""
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(number, spec.num_layers)
    others = family_of(spec.architecture).weights(spec)
    order = None
    if kind in _PAIRED:
        order = rotated_order(RopeSpec(theta=1.0, interleaved=True), spec.head_dim)
    sources = {}
    for name, shape in decoder_tensors(spec).items():
        source = _of_layer(name, shape, spec)
        if source is None:
            stored = names.get_name(others[name].name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            source = msgspec.structs.replace(others[name], name=stored)
        if order is not None and name.split(".")[-2] in ("q_proj", "k_proj"):
            source = msgspec.structs.replace(source, head_order=order)
        sources[name] = source
    return sources


def _of_layer(name: str, shape: Shape, spec: ModelSpec) -> Source | None:
    """Return the location of a tensor that GGUF stacks differently or names without a suffix."""
    parts = name.split(".")
    if parts[-1] == "sinks":
        return Source(name=f"blk.{parts[2]}.attn_sinks.weight", shape=shape)
    if parts[-1] == "correction":
        return Source(name=f"blk.{parts[2]}.exp_probs_b.bias", shape=shape)
    if "experts" not in parts:
        return None
    assert spec.moe is not None
    *_, expert, matrix, kind = parts
    stack = f"blk.{parts[2]}.ffn_{matrix.removesuffix('_proj')}_exps.{kind}"
    return Source(name=stack, shape=(spec.moe.num_experts, *shape), index=int(expert))
