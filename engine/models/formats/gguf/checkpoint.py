"""A GGUF file as a checkpoint: tensors by the decoder's names, expanded when they are asked for."""

from math import prod
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.models.formats.checkpoint import compare
from engine.models.formats.fingerprint import weights_fingerprint
from engine.models.formats.gguf.expansion import INT4_TYPES, expand, int4_codes
from engine.models.products.int4 import Int4Weights
from engine.models.products.mxfp4 import Mxfp4Weights
from engine.models.spec import ModelSpec, RopeSpec
from engine.models.weights import (
    Shape,
    Source,
    WeightMap,
    rotated_order,
    stored_tensors,
    weight_map,
)
from engine.shared.gguf.reader import TensorInfo, read_gguf

_AT_ONCE = 1 << 22
"""Elements that are expanded at once, which bounds the memory for it."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_NOT_WEIGHTS = ("rope_freqs.weight",)
"""What has been read with the config."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTERLEAVED = ("LlamaForCausalLM", "MixtralForCausalLM")
"""Architectures whose queries and keys are stored in pairs that rotate together."""


class GgufCheckpoint:
    """The tensors of one file, mapped into memory."""

    def __init__(self, path: Path, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        """Compare the file's tensors with what the model needs.

        Args:
            dtype: what tensors are expanded to; None for the type that the embeddings have, or
                bfloat16 if that is none to compute in.

        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape.
            BadGguf: the file is broken.
        """
        gguf = read_gguf(path)
        self._digest = gguf.digest
        self._infos = gguf.tensors
        self._weights = _sources(spec)
        found = {name: info.shape for name, info in self._infos.items() if name not in _NOT_WEIGHTS}
        compare(path, stored_tensors(self._weights), found)
        self._bytes = torch.from_file(
            str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
        )
        stored = self._infos["token_embd.weight"].storage.name
        self._dtype = dtype or _FLOATS.get(stored, torch.bfloat16)

    @property
    def dtype(self) -> torch.dtype:
        """The type that tensors are expanded to."""
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the decoder in memory of its own."""
        source, info = self._found(name)
        return source.read(self._expanded(info))

    def int4(self, name: str) -> Int4Weights | None:
        """Return the codes, scales and zero points of a weight that is stored in 4 bits."""
        source, info = self._found(name)
        if info.storage.name not in INT4_TYPES:
            return None
        rows = info.shape[0]
        parts = int4_codes(self._blocks(info), info.storage.name)
        codes, scales, zeros = (source.read(part.reshape(rows, -1)) for part in parts)
        return Int4Weights(codes, scales, zeros)

    def mxfp4(self, name: str) -> Mxfp4Weights | None:
        """None: that type is not read."""
        return None

    def _found(self, name: str) -> tuple[Source, TensorInfo]:
        """Return a tensor's place; if it is one of a stack, the others are not touched."""
        source = self._weights[name]
        info = self._infos[source.name]
        if source.index is None:
            return source, info
        one = msgspec.structs.replace(info, shape=info.shape[1:])
        first = info.offset + source.index * one.num_bytes
        alone = msgspec.structs.replace(source, index=None, shape=one.shape)
        return alone, msgspec.structs.replace(one, offset=first)

    def _blocks(self, info: TensorInfo) -> Tensor:
        return self._stored(info).view(-1, info.storage.num_bytes)

    def fingerprint(self) -> str:
        """Digest of the metadata and some bytes of every tensor."""
        described = {
            name: f"{info.shape} {info.storage.name}" for name, info in self._infos.items()
        }
        return weights_fingerprint(
            self._digest.encode(), described, lambda name: self._stored(self._infos[name])
        )

    def _stored(self, info: TensorInfo) -> Tensor:
        return self._bytes[info.offset : info.offset + info.num_bytes]

    def _expanded(self, info: TensorInfo) -> Tensor:
        elements = info.storage.elements
        blocks = self._blocks(info)
        expanded = torch.empty(prod(info.shape), dtype=self._dtype)
        at_once = _AT_ONCE // elements
        for first in range(0, len(blocks), at_once):
            part = blocks[first : first + at_once].clone()  # aligned, whatever the file is
            values = expand(part, info.storage.name).flatten()
            expanded[first * elements : first * elements + len(values)].copy_(values)
        return expanded.view(info.shape)


def _sources(spec: ModelSpec) -> WeightMap:
    found = weight_map(spec, lambda name, shape: _place(spec, name, shape))
    if spec.architecture not in _INTERLEAVED:
        return found
    order = rotated_order(RopeSpec(theta=1.0, interleaved=True), spec.head_dim)
    return {
        name: msgspec.structs.replace(source, head_order=order)
        if name.split(".")[-2] in ("q_proj", "k_proj")
        else source
        for name, source in found.items()
    }


def _place(spec: ModelSpec, name: str, shape: Shape) -> Source:
    parent, _, kind = name.rpartition(".")
    if parent in _NAMES:
        return Source(name=f"{_NAMES[parent]}.{kind}", shape=shape)
    layer, _, part = parent.removeprefix("model.layers.").partition(".")
    if ".experts." not in part:
        return Source(name=f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}", shape=shape)
    assert spec.moe is not None
    _, _, expert, matrix = part.split(".")
    return Source(
        name=f"blk.{layer}.{_EXPERT_NAMES[matrix]}.{kind}",
        shape=(spec.moe.num_experts, *shape),
        index=int(expert),
    )
