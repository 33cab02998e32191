"""Builds a decoder from a checkpoint, layer by layer.

Each tensor is copied from the mapped file into its place in a fused weight, and each fused weight
is packed and dropped before the next is made, so that memory stays near the model's own size.
"""

import logging
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.models.attention import PagedAttention
from engine.models.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    ExpertNames,
    SafetensorsCheckpoint,
    expected_tensors,
    expert_names,
)
from engine.models.decoder import AttentionWeights, Decoder, DecoderWeights, Followers, LayerWeights
from engine.models.expert_parallel import ExpertGroup, SpreadExperts, expert_share
from engine.models.hf_config import ModelSpec, MoeSpec, UnsupportedModel
from engine.models.int8 import prepare_int8
from engine.models.layers import Linear, prepare_linear
from engine.models.moe import (
    Expert,
    Experts,
    GroupedExperts,
    Router,
    SparseMlp,
    StackedExperts,
)
from engine.models.processor import float32_is_faster
from engine.models.rotary import rotary_table
from engine.models.row_blocks import RowBlocks, probe_rows
from engine.models.tensor_parallel import (
    Block,
    Cut,
    CutCheckpoint,
    CutEmbedding,
    CutHead,
    SummedOver,
)
from engine.models.varlen_attention import Attention, CudaAttention
from engine.shared.config import ModelConfig

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_CACHED_WEIGHTS = 1 << 24
"""Parameters of the largest model that counts as small: 64 MB in float32."""


def open_checkpoint(directory: Path, spec: ModelSpec, config: ModelConfig) -> Checkpoint:
    """Open the weights that the settings ask for.

    Raises:
        CheckpointError: the files do not hold what the model's config says.
    """
    if config.load_format == "dummy":
        return DummyCheckpoint(directory, spec, config.seed, _dummy_dtype(spec, config))
    return SafetensorsCheckpoint(directory, spec)


def _dummy_dtype(spec: ModelSpec, config: ModelConfig) -> torch.dtype:
    return _DTYPES[spec.dtype or "float32" if config.dtype == "auto" else config.dtype]


def fits_caches(spec: ModelSpec) -> bool:
    """Whether a processor's caches hold the weights, even in float32."""
    return sum(prod(shape) for shape in expected_tensors(spec).values()) <= _CACHED_WEIGHTS


class ComputeTypes(NamedTuple):
    """What a model computes in."""

    activations: torch.dtype
    """Also of the weights."""
    cache: torch.dtype
    """Of keys and values."""


def compute_types(
    spec: ModelSpec,
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    is_alone: bool = True,
) -> ComputeTypes:
    """Return the types that are set; else the config's, else as stored.

    A small model is computed in float32 where that is faster, but for its KV cache. Processes that
    compute one model together (not `is_alone`) exchange activations and may run on different
    processors, so they keep the model's own type.
    """
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
        return ComputeTypes(dtype, dtype)
    dtype = _DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype
    own = ComputeTypes(dtype, dtype)
    if dtype.itemsize != 2 or not is_alone or config.quantization is not None:
        return own
    if device.type == "cpu" and float32_is_faster() and fits_caches(spec):
        return own._replace(activations=torch.float32)
    return own


def model_length(spec: ModelSpec, config: ModelConfig) -> int:
    """Return the longest sequence in tokens.

    Raises:
        UnsupportedModel: the settings ask for more than the model was made for.
    """
    longest = spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UnsupportedModel(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions "
            "that the model was made for"
        )
    return config.max_model_len


class GroupPlace(NamedTuple):
    """One engine's place among those that the experts are spread over."""

    position: int
    size: int


class Shard(NamedTuple):
    """One process's part of a model that is cut over a group."""

    group: Group
    followers: Followers | None = None
    """At the first rank, the others."""


class DecoderLoader:
    """Assembles the weights of one model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        types: ComputeTypes,
        device: torch.device,
        max_model_len: int,
        place: GroupPlace | None = None,
        shard: Shard | None = None,
        quantization: Literal["int8"] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Prepare to load all, or only the experts of a place, or only the part of a shard.

        If `batch_invariant`, no row of a step depends on the others (`engine.models.row_blocks`).

        Raises:
            UnsupportedModel: that is not possible here.
        """
        if batch_invariant and (device.type != "cpu" or place is not None or shard is not None):
            raise UnsupportedModel(
                "--batch-invariant: only engines on CPUs that hold the whole model compute rows "
                "independently of each other"
            )
        self._batch_invariant = batch_invariant
        self._place = place
        self._shard = shard
        self._cut = None if shard is None else Cut(spec, shard.group.rank, shard.group.size)
        self._spec = spec if self._cut is None else self._cut.spec
        self._checkpoint = checkpoint if self._cut is None else CutCheckpoint(checkpoint, self._cut)
        self._types = types
        self._device = device
        self._max_model_len = max_model_len
        self._quantization = quantization

    def load(self) -> Decoder:
        """Read all weights that belong here and return the model."""
        spec = self._spec
        self._expert_group = None
        if self._place is not None:
            assert spec.moe is not None, "only experts are spread"
            self._expert_group = ExpertGroup(
                spec.moe.num_experts, spec.moe.experts_per_token, self._device
            )
        embedding = self._copy("model.embed_tokens.weight")
        tied = spec.tie_word_embeddings
        weights = DecoderWeights(
            embedding=embedding,
            embed=self._embed(embedding),
            layers=[self._layer(index) for index in range(spec.num_layers)],
            norm=self._copy("model.norm.weight"),
            lm_head=self._head(
                self._by_rows(
                    self._prepare(embedding, None) if tied else self._linear("lm_head.weight"),
                    spec.hidden_size,
                )
            ),
            rotary=rotary_table(
                spec.rope, spec.head_dim, self._max_model_len, self._types.activations, self._device
            ),
        )
        followers = None if self._shard is None else self._shard.followers
        return Decoder(
            spec, weights, self._attend(), self._types.cache, self._expert_group, followers
        )

    def _attend(self) -> Attention:
        spec, dtype, device = self._spec, self._types.cache, self._device
        stock = PagedAttention(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
            token_by_token=self._batch_invariant,
        )
        if device.type != "cuda":
            return stock
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return CudaAttention(stock, shape=shape, dtype=dtype, device=device)

    def spread_experts(self, model: Decoder, place: GroupPlace) -> None:
        """Drop the experts of a loaded model that others hold now, and load those that it lacks."""
        assert model.expert_group is not None, "the model was loaded without a place"
        model.expert_group.leave()
        self._place = place
        for index, mlp in model.sparse_layers.items():
            assert isinstance(mlp.experts, SpreadExperts)
            self._hold_share(mlp.experts, f"model.layers.{index}.")

    def _embed(self, table: Tensor) -> Callable[[Tensor], Tensor]:
        if self._shard is None or self._cut is None:
            return partial(torch.embedding, table)
        return CutEmbedding(self._shard.group, table, self._cut.vocabulary)

    def _head(self, head: Linear) -> Linear:
        if self._shard is None:
            return head
        return CutHead(self._shard.group, head, self._spec.vocab_size)

    def _summed(self, block: Block) -> Block:
        """Join the parts of a block that is cut."""
        return block if self._shard is None else SummedOver(self._shard.group, block)

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        return LayerWeights(
            input_norm=self._copy(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn."),
            mlp_norm=self._copy(prefix + "post_attention_layernorm.weight"),
            mlp=self._summed(
                self._sparse_mlp(prefix)
                if self._spec.is_sparse(index)
                else self._by_rows(self._mlp(prefix + "mlp."), self._spec.hidden_size)
            ),
            window=self._spec.windows[index],
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        spec = self._spec
        projections = [f"{prefix}{name}_proj" for name in "qkv"]
        bias = [f"{name}.bias" for name in projections] if spec.qkv_bias else []
        norm = None
        if spec.qk_norm:
            query, key = self._copy(prefix + "q_norm.weight"), self._copy(prefix + "k_norm.weight")
            norm = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
        return AttentionWeights(
            qkv=self._by_rows(
                self._linear(*(f"{name}.weight" for name in projections), bias=bias),
                spec.hidden_size,
            ),
            output=self._summed(
                self._by_rows(
                    self._linear(
                        prefix + "o_proj.weight",
                        bias=[prefix + "o_proj.bias"] if spec.output_bias else [],
                    ),
                    spec.query_size,
                )
            ),
            qk_norm=norm,
        )

    def _mlp(self, prefix: str) -> Expert:
        names = [prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj"]
        bias = [f"{name}.bias" for name in names] if self._spec.mlp_bias else []
        return Expert(
            self._linear(f"{names[0]}.weight", f"{names[1]}.weight", bias=bias[:2]),
            self._linear(f"{names[2]}.weight", bias=bias[2:]),
        )

    def _sparse_mlp(self, layer: str) -> Linear:
        moe, names = self._spec.moe, expert_names(self._spec)
        assert moe is not None
        router = Router(
            # Choices between experts turn on small differences, and the product is a small one.
            prepare_linear(self._copy(f"{layer}{names.block}.gate.weight")),
            moe.experts_per_token,
            normalize=moe.normalize_weights,
        )
        if self._expert_group is None:
            experts = self._experts(moe, layer, names)
            return self._by_rows(SparseMlp(router, experts), self._spec.hidden_size)
        spread = SpreadExperts(self._expert_group)
        self._hold_share(spread, layer)
        return SparseMlp(router, spread)

    def _hold_share(self, spread: SpreadExperts, layer: str) -> None:
        assert self._place is not None
        assert self._spec.moe is not None
        share = expert_share(self._spec.moe.num_experts, self._place.position, self._place.size)
        names = expert_names(self._spec)
        spread.hold(share, lambda number: self._expert(layer, names, number))

    def _expert(self, layer: str, names: ExpertNames, number: int) -> Linear:
        prefix = f"{layer}{names.block}.experts.{number}."
        expert = Expert(
            self._linear(f"{prefix}{names.gate}.weight", f"{prefix}{names.up}.weight"),
            self._linear(f"{prefix}{names.down}.weight"),
        )
        return self._by_rows(expert, self._spec.hidden_size)

    def _by_rows(self, function: Linear, width: int) -> Linear:
        """Return a function of rows [rows, width] that computes each by itself, if so wished."""
        if not self._batch_invariant:
            return function
        return RowBlocks(function, probe_rows(width, self._types.activations))

    def _experts(self, moe: MoeSpec, layer: str, names: ExpertNames) -> Experts:
        hidden, inner = self._spec.hidden_size, moe.intermediate_size
        num_bytes = 3 * moe.num_experts * hidden * inner * self._types.activations.itemsize
        if not StackedExperts.suits(moe.num_experts, moe.experts_per_token, num_bytes):
            return GroupedExperts([self._expert(layer, names, i) for i in range(moe.num_experts)])
        prefixes = [f"{layer}{names.block}.experts.{i}." for i in range(moe.num_experts)]
        gate_up = [
            self._fused([f"{p}{names.gate}.weight", f"{p}{names.up}.weight"]) for p in prefixes
        ]
        down = [self._copy(f"{p}{names.down}.weight").T for p in prefixes]
        return StackedExperts(torch.stack(gate_up), torch.stack(down))

    def _linear(self, *names: str, bias: list[str] | None = None) -> Linear:
        return self._prepare(self._fused(list(names)), self._fused(bias) if bias else None)

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._quantization == "int8":
            return prepare_int8(weight, bias)
        return prepare_linear(weight, bias)

    def _fused(self, names: list[str]) -> Tensor:
        """Return the tensors one below the other in new memory."""
        parts = [self._checkpoint.tensor(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        fused = torch.empty(
            rows, *parts[0].shape[1:], dtype=self._types.activations, device=self._device
        )
        first = 0
        for part in parts:
            fused[first : first + part.shape[0]].copy_(part)
            first += part.shape[0]
        return fused

    def _copy(self, name: str) -> Tensor:
        return self._fused([name])
