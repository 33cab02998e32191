"""Builds a decoder from a checkpoint, layer by layer."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.kernels.registry import FusedKernels
from engine.models.adapters import AdapterBank
from engine.models.attention.choice import attention_of, stock_attention
from engine.models.attention.projections import (
    HeadProjections,
    HeadwiseProduct,
    LatentProjections,
    LayerSettings,
    SelfAttention,
)
from engine.models.attention.rotary import Rotary, rotary_table, temperatures
from engine.models.decoder import Decoder, DecoderLayer, Followers
from engine.models.formats.checkpoint import Checkpoint
from engine.models.layers import (
    Chain,
    Embedding,
    Norm,
    prepare_norm,
    prepare_qk_norm,
    scaled,
    softcap,
    unit_norm,
)
from engine.models.loading.invariance import require_batch_invariance
from engine.models.loading.mlps import GroupPosition, MlpLoader
from engine.models.loading.products import ProductLoader, Quantization
from engine.models.module import Rows
from engine.models.parallel.balance import ExpertBalance
from engine.models.parallel.experts import DistributedExperts, ExpertGroup
from engine.models.parallel.sharded_state import ShardedState
from engine.models.parallel.stages import Stage
from engine.models.parallel.tensors import (
    ShardedCheckpoint,
    TensorSharding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from engine.models.products.blocked import BlockedLinear
from engine.models.products.dense import DenseLinear
from engine.models.products.int4 import require_int4
from engine.models.products.row_blocks import RowBlocks, probe_rows
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, NormSpec, RopeSpec, UnsupportedModel
from engine.models.weights import layer_norms
from engine.shared.config import LoraConfig


class Shard(NamedTuple):
    """One process's part of a tensor-parallel model."""

    group: Group
    followers: Followers | None = None
    """The other processes, on rank 0."""


class AdapterCapacity(NamedTuple):
    """The maximum number of adapters in one step, and their maximum rank."""

    num_slots: int
    rank: int

    @classmethod
    def of(cls, config: LoraConfig) -> "AdapterCapacity | None":
        """Return the configured room; None without adapters."""
        return cls(config.max_loras, config.max_lora_rank) if config.enable_lora else None


def _nothing(hidden: Tensor) -> Tensor:
    return hidden


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
        in_group: GroupPosition | None = None,
        shard: Shard | None = None,
        stage: Stage | None = None,
        quantization: Quantization | None = None,
        batch_invariant: bool = False,
        adapters: AdapterCapacity | None = None,
        balance: ExpertBalance | None = None,
        kernels: FusedKernels | None = None,
        first_key: int = 0,
    ) -> None:
        """Prepare to load the whole model, only `in_group`'s experts, only `shard`'s part, or both.

        A pipeline `stage` restricts any of these to its own layers. `balance` specifies the experts
        of `in_group`, if not an even share. With fused `kernels`, kernels compute products where
        possible. `first_key` is as in `PagedAttention`.

        If `batch_invariant`, no row of a step depends on the others
        (`engine.models.products.row_blocks`).

        Raises:
            UnsupportedModel, Int4Unsupported: the combination is not supported.
        """
        if batch_invariant:
            require_batch_invariance(
                spec,
                types,
                device,
                is_whole=in_group is None and shard is None,
                is_quantized=quantization is not None,
                has_adapters=adapters is not None,
                kernels=kernels,
            )
        if adapters is not None and spec.latent is not None:
            raise UnsupportedModel(
                f"--enable-lora: {spec.architecture} has latent attention, which is computed "
                "without the products that adapters change"
            )
        if quantization in ("int4", "stored"):
            require_int4(quantization, types.activations, device)
        self._batch_invariant = batch_invariant
        self._kernels = kernels
        self._first_key = first_key
        self._shard = shard
        self._sharding = None
        if shard is not None:
            ranks = shard.group.rank, shard.group.size
            self._sharding = TensorSharding(spec, *ranks, whole_experts=in_group is not None)
        self._stage = stage or Stage(range(spec.num_layers), spec.num_layers)
        self._spec = self._stage.spec(spec if self._sharding is None else self._sharding.spec)
        self._types = types
        self._device = device
        self._max_model_len = max_model_len
        self._bank = None
        if adapters is not None:
            self._bank = AdapterBank(
                *adapters,
                dtype=types.activations,
                device=device,
                sharding=self._sharding,
                by_rows=batch_invariant,
            )
        self._expert_group = None
        if in_group is not None:
            moe, shards = self._spec.moe, None if shard is None else shard.group
            assert moe is not None, "only experts are spread"
            sizes = moe.num_experts, moe.experts_per_token
            self._expert_group = ExpertGroup(*sizes, device, shards, balance)
            self._expert_group.prepare(*in_group)
        if self._sharding is not None and not isinstance(checkpoint, ShardedState):
            checkpoint = ShardedCheckpoint(checkpoint, self._sharding)
        self._products = ProductLoader(
            checkpoint,
            types.activations,
            device,
            quantization=quantization,
            is_row_independent=batch_invariant,
            bank=self._bank,
            by_kernels=kernels is not None,
        )
        self._mlps = MlpLoader(self._spec, self._products, self._expert_group, kernels)

    def load(self, progress: Callable[[int, int], None] = lambda layer, layers: None) -> Decoder:
        """Read all weights of this process and return the model.

        `progress` is called with the number of the layer being read, from 1, and that of layers.
        """
        spec, types, device = self._spec, self._types, self._device
        longest = self._max_model_len

        def layer(index: int) -> DecoderLayer:
            progress(index + 1, spec.num_layers)
            return self._layer(index)

        def rotary(rope: RopeSpec) -> Rotary:
            table = rotary_table(rope, spec.rotary_size, longest, types.activations, device)
            return Rotary(table, rope.sections)

        is_first, is_last = self._stage.is_first, self._stage.is_last
        look_up = tied = None
        if is_first or (is_last and spec.tie_word_embeddings):
            look_up, tied = self._embedding()
        attention = attention_of(
            spec,
            types.kv_format,
            device,
            token_by_token=self._batch_invariant,
            first_key=self._first_key,
            kernels=self._kernels,
        )
        heat, image_attention = spec.attention_temperature, None
        if spec.vision is not None and spec.vision.is_bidirectional:
            image_attention = stock_attention(spec, types.kv_format, device)
        return Decoder(
            spec,
            [layer(index) for index in range(spec.num_layers)],
            attention,
            types,
            device,
            rotary=[rotary(rope) for rope in spec.distinct_ropes],
            temperatures=None if heat is None else temperatures(heat, longest, device),
            embed_tokens=self._embed(look_up) if is_first and look_up is not None else None,
            norm=self._norm("model.norm") if is_last else None,
            lm_head=self._head(tied) if is_last else None,
            expert_group=self._expert_group,
            followers=None if self._shard is None else self._shard.followers,
            adapters=self._bank,
            image_attention=image_attention,
        )

    def redistribute_experts(self, model: Decoder, in_group: GroupPosition) -> None:
        """Update a loaded model's experts for a new position: drop surplus, load missing ones."""
        assert model.expert_group is not None, "the model was loaded without a group"
        model.expert_group.leave()
        model.expert_group.prepare(*in_group)
        for index, mlp in model.sparse_layers.items():
            assert isinstance(mlp.experts, DistributedExperts)
            self._mlps.load_share(mlp.experts, f"{self._prefix(index)}mlp.", index)

    def _embedding(self) -> tuple[Rows, Rows | None]:
        """Return the embedding lookup, and the tied LM head's product if there is one."""
        spec = self._spec
        table = self._products.copy("model.embed_tokens.weight")
        look_up: Rows = Embedding(table)
        if not (self._stage.is_last and spec.tie_word_embeddings and spec.num_outputs is None):
            return look_up, None
        product = self._products.prepare(table, None)
        return product.rows if isinstance(product, BlockedLinear) else look_up, product

    def _embed(self, look_up: Rows) -> Rows:
        # Rounded like the weights, as in training.
        scale = float(torch.tensor(self._spec.embedding_scale, dtype=self._types.activations))
        embed = look_up
        if self._shard is not None and self._sharding is not None:
            embed = VocabParallelEmbedding(self._shard.group, look_up, self._sharding.vocabulary)
        if self._bank is not None:
            widths = [self._spec.hidden_size]
            embed = self._bank.adapted(embed, ["model.embed_tokens"], widths, of="embedding")
        return scaled(embed, scale)

    def _head(self, tied: Rows | None) -> Rows:
        """Return the LM head or classifier; uses the embedding product if tied."""
        spec = self._spec
        if spec.num_outputs == 0:  # an embedding model
            return _nothing
        if spec.num_outputs is not None:
            score = DenseLinear(self._products.copy("score.weight").float(), None)
            if not self._batch_invariant:
                return score
            return RowBlocks(score, probe_rows(spec.hidden_size, torch.float32))
        product = self._products.linear("lm_head.weight") if tied is None else tied
        head: Rows = self._products.by_rows(product, spec.hidden_size)
        if self._bank is not None:
            part = (
                slice(0, spec.vocab_size) if self._sharding is None else self._sharding.vocabulary
            )
            head = self._bank.adapted(head, ["lm_head"], [part.stop - part.start], of="head")
        if self._shard is not None:
            head = VocabParallelHead(self._shard.group, head, spec.vocab_size)
        head = scaled(head, spec.logits_scale)
        if spec.logits_softcap is None:
            return head
        return Chain(head, partial(softcap, cap=spec.logits_softcap))

    def _prefix(self, index: int) -> str:
        """Return the name prefix of a layer's tensors; `index` counts this stage's layers."""
        return f"model.layers.{self._stage.layers[index]}."

    def _layer(self, index: int) -> DecoderLayer:
        spec, products, prefix = self._spec, self._products, self._prefix(index)
        norms = {name: self._norm(prefix + name) for name in layer_norms(spec)}
        sparse = self._mlps.sparse(prefix + "mlp.", index) if spec.is_sparse(index) else None
        mlp: Rows
        if sparse is None:
            mlp = self._mlps.dense(prefix + "mlp.", spec.intermediate_size)
        elif self._expert_group is None and self._bank is None and not products.splits_experts:
            mlp = products.by_rows(sparse, spec.hidden_size)
        else:  # each part computes rows separately
            mlp = sparse
        rope, heat = spec.ropes[index], spec.attention_temperature
        settings = LayerSettings(
            spec.windows[index],
            None if rope is None else spec.distinct_ropes.index(rope),
            spec.cache_groups.group_of(index),
            heat is not None and (rope is None or heat.of_all_layers),
        )
        attention = self._attention if spec.latent is None else self._latent_attention
        return DecoderLayer(
            attention_norm=norms.get("attention_norm"),
            self_attn=attention(prefix + "self_attn.", settings),
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp=mlp,
            mlp_output_norm=norms.get("mlp_output_norm"),
            is_parallel=spec.block == "parallel",
            residual_scale=spec.residual_scale,
            shards=None if self._shard is None else self._shard.group,
        )

    def _norm(self, name: str) -> Norm:
        return prepare_norm(self._spec.norm, self._products.copy(name + ".weight"), self._kernels)

    def _attention(self, prefix: str, settings: LayerSettings) -> SelfAttention:
        spec = self._spec
        projections = [f"{prefix}{name}_proj" for name in "qkv"]
        bias = [f"{name}.bias" for name in projections] if spec.qkv_bias else []
        qk_norm: Rows | None = None
        if spec.qk_norm == "unit":
            qk_norm = None if settings.rope is None else partial(unit_norm, eps=spec.norm.eps)
        elif spec.qk_norm != "none":
            query, key = (self._products.copy(f"{prefix}{name}_norm.weight") for name in "qk")
            qk_norm = prepare_qk_norm(spec, query, key, self._kernels)
        output = self._products.linear(
            prefix + "o_proj.weight", bias=[prefix + "o_proj.bias"] if spec.output_bias else []
        )
        qkv = self._products.linear(*(f"{name}.weight" for name in projections), bias=bias)
        widths = [spec.query_size, spec.kv_size, spec.kv_size]
        return HeadProjections(
            spec,
            settings,
            qkv=self._products.adapted(qkv, projections, widths, spec.hidden_size),
            output=self._products.adapted(
                output, [prefix + "o_proj"], [spec.hidden_size], spec.query_size
            ),
            kv_format=self._types.kv_format,
            kernels=self._kernels,
            qk_norm=qk_norm,
            sinks=self._products.copy(prefix + "sinks").float() if spec.attention_sinks else None,
        )

    def _latent_attention(self, prefix: str, settings: LayerSettings) -> SelfAttention:
        spec, latent, products = self._spec, self._spec.latent, self._products
        assert latent is not None
        norm = NormSpec(eps=latent.eps)
        first = prefix + ("q_proj" if latent.query_rank is None else "q_a_proj")
        names, queries = [first, prefix + "kv_a_proj"], None
        bias = [f"{name}.bias" for name in names] if spec.qkv_bias else []
        inputs = products.linear(*(f"{name}.weight" for name in names), bias=bias)
        if latent.query_rank is not None:
            queries = Chain(
                prepare_norm(norm, products.copy(prefix + "q_a_norm.weight"), self._kernels),
                products.by_rows(products.linear(prefix + "q_b_proj.weight"), latent.query_rank),
            )
        heads = products.copy(prefix + "kv_b_proj.weight").view(spec.num_heads, -1, latent.rank)
        keys, values = torch.split(heads, [latent.plain_size, latent.value_size], dim=1)
        from_latent = HeadwiseProduct(values.transpose(1, 2).contiguous())
        values_size = spec.num_heads * latent.value_size
        output = products.linear(
            prefix + "o_proj.weight", bias=[prefix + "o_proj.bias"] if spec.output_bias else []
        )
        return LatentProjections(
            spec,
            settings,
            products.by_rows(inputs, spec.hidden_size),
            kv_format=self._types.kv_format,
            queries=queries,
            norm=prepare_norm(norm, products.copy(prefix + "kv_a_norm.weight"), self._kernels),
            to_latent=products.by_rows(
                HeadwiseProduct(keys.contiguous()), spec.num_heads * latent.plain_size
            ),
            output=Chain(
                products.by_rows(from_latent, spec.query_size),
                products.by_rows(output, values_size),
            ),
        )
