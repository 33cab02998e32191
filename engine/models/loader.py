"""Builds a decoder from a checkpoint, layer by layer.

Each tensor is copied from the mapped file into its place in a fused weight, and each fused weight
is packed and dropped before the next is made, so that memory stays near the model's own size.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.distributed.group import Group
from engine.models.adapters import AdapterBank
from engine.models.attention.paged import PagedAttention
from engine.models.attention.rotary import rotary_table
from engine.models.attention.varlen import Attention, CudaAttention
from engine.models.decoder import AttentionWeights, Decoder, DecoderWeights, Followers, LayerWeights
from engine.models.formats.checkpoint import Checkpoint
from engine.models.layers import (
    Chain,
    Rows,
    gated,
    prepare_norm,
    prepare_qk_norm,
    scaled,
    softcap,
)
from engine.models.moe import (
    Expert,
    Experts,
    GroupedExperts,
    Router,
    SigmoidRouter,
    SparseMlp,
    StackedExperts,
)
from engine.models.parallel.experts import ExpertGroup, SpreadExperts, expert_share
from engine.models.parallel.stages import Stage
from engine.models.parallel.tensors import Cut, CutCheckpoint, CutEmbedding, CutHead, SummedOver
from engine.models.products.dense import Linear, prepare_linear
from engine.models.products.int4 import (
    Int4Linear,
    Int4Weights,
    fits_int4,
    joined,
    quantized,
    require_int4,
)
from engine.models.products.int8 import prepare_int8
from engine.models.products.mxfp4 import Mxfp4Linear, Mxfp4Weights
from engine.models.products.row_blocks import RowBlocks, probe_rows
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, MoeSpec, UnsupportedModel
from engine.models.weights import layer_norms


class GroupPlace(NamedTuple):
    """One engine's place among those that share the experts."""

    position: int
    size: int


class Shard(NamedTuple):
    """One process's part of a model that is cut over a group."""

    group: Group
    followers: Followers | None = None
    """At the first rank, the others."""


class AdapterRoom(NamedTuple):
    """The maximum number of adapters in one step, and their maximum rank."""

    num_slots: int
    rank: int


def _nothing(hidden: Tensor) -> Tensor:
    return hidden


class DecoderLoader:
    """Assembles the weights of one model on one device.

    More than 20 methods: one for each kind of layer, and for each way to cut and pack a matrix.
    """

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
        stage: Stage | None = None,
        quantization: Literal["int8", "int4"] | None = None,
        batch_invariant: bool = False,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """Prepare to load all, or only the experts of a place, or only the part of a shard.

        Of all these, a pipeline stage has its own layers only.

        If `batch_invariant`, no row of a step depends on the others
        (`engine.models.products.row_blocks`).

        Raises:
            UnsupportedModel, Int4Unsupported: that is not possible here.
        """
        if batch_invariant and (device.type != "cpu" or place is not None or shard is not None):
            raise UnsupportedModel(
                "--batch-invariant: only engines on CPUs that hold the whole model compute rows "
                "independently of each other"
            )
        if batch_invariant and spec.attention_softcap is not None:
            raise UnsupportedModel(
                f"--batch-invariant: {spec.architecture} caps attention scores, and no operator "
                "does that for each token by itself"
            )
        if quantization == "int4":
            require_int4(types.activations, device)
        self._batch_invariant = batch_invariant
        self._place = place
        self._shard = shard
        self._cut = None if shard is None else Cut(spec, shard.group.rank, shard.group.size)
        self._stage = stage or Stage(range(spec.num_layers), spec.num_layers)
        self._spec = self._stage.spec(spec if self._cut is None else self._cut.spec)
        self._checkpoint = checkpoint if self._cut is None else CutCheckpoint(checkpoint, self._cut)
        self._types = types
        self._device = device
        self._max_model_len = max_model_len
        self._quantization = quantization
        self._adapters = adapters
        self._bank: AdapterBank | None = None

    def load(self) -> Decoder:
        """Read all weights that belong here and return the model."""
        spec = self._spec
        self._expert_group = None
        if self._place is not None:
            assert spec.moe is not None, "only experts are spread"
            self._expert_group = ExpertGroup(
                spec.moe.num_experts, spec.moe.experts_per_token, self._device
            )
        self._bank = self._new_bank()
        is_first, is_last = self._stage.is_first, self._stage.is_last
        embedding = None
        if is_first or (is_last and spec.tie_word_embeddings):
            embedding = self._copy("model.embed_tokens.weight")
        weights = DecoderWeights(
            embed=self._embed(embedding) if is_first and embedding is not None else None,
            layers=[self._layer(index) for index in range(spec.num_layers)],
            norm=self._norm("model.norm") if is_last else None,
            lm_head=self._head(embedding) if is_last else None,
            rotary=[
                rotary_table(
                    rope, spec.head_dim, self._max_model_len, self._types.activations, self._device
                )
                for rope in spec.distinct_ropes
            ],
        )
        followers = None if self._shard is None else self._shard.followers
        return Decoder(
            spec,
            weights,
            self._attend(),
            self._types,
            self._device,
            self._expert_group,
            followers,
            self._bank,
        )

    def _new_bank(self) -> AdapterBank | None:
        if self._adapters is None:
            return None
        return AdapterBank(
            *self._adapters,
            dtype=self._types.activations,
            device=self._device,
            cut=self._cut,
            by_rows=self._batch_invariant,
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
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
        )
        if device.type != "cuda" or spec.attention_softcap is not None:
            return stock
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return CudaAttention(
            stock,
            shape=shape,
            dtype=dtype,
            device=device,
            scale=spec.attention_scale,
            has_sinks=spec.attention_sinks,
        )

    def spread_experts(self, model: Decoder, place: GroupPlace) -> None:
        """Drop the experts of a loaded model that others hold now, and load those that it lacks."""
        assert model.expert_group is not None, "the model was loaded without a place"
        model.expert_group.leave()
        self._place = place
        for index, mlp in model.sparse_layers.items():
            assert isinstance(mlp.experts, SpreadExperts)
            self._hold_share(mlp.experts, f"{self._prefix(index)}mlp.")

    def _embed(self, table: Tensor) -> Rows:
        # Rounded like the weights, as the models were trained.
        scale = float(torch.tensor(self._spec.embedding_scale, dtype=self._types.activations))
        embed: Rows = partial(torch.embedding, table)
        if self._shard is not None and self._cut is not None:
            embed = CutEmbedding(self._shard.group, table, self._cut.vocabulary)
        if self._bank is not None:
            embed = self._bank.embedding(embed, "model.embed_tokens", self._spec.hidden_size)
        return scaled(embed, scale)

    def _head(self, embedding: Tensor | None) -> Rows:
        """Return what makes logits; of the embedding, where it is tied to that."""
        spec = self._spec
        if spec.num_outputs is not None:
            return self._classifier_head()
        if embedding is not None and spec.tie_word_embeddings:
            product = self._prepare(embedding, None)
        else:
            product = self._linear("lm_head.weight")
        head: Rows = self._by_rows(product, spec.hidden_size)
        if self._bank is not None:
            part = slice(0, spec.vocab_size) if self._cut is None else self._cut.vocabulary
            head = self._bank.head(head, "lm_head", part.stop - part.start)
        if self._shard is not None:
            head = CutHead(self._shard.group, head, spec.vocab_size)
        head = scaled(head, spec.logits_scale)
        if spec.logits_softcap is None:
            return head
        return Chain(head, partial(softcap, cap=spec.logits_softcap))

    def _classifier_head(self) -> Rows:
        """Return the product with a classifier's weights in float32; of an embedder, nothing."""
        if not self._spec.num_outputs:
            return _nothing
        head = partial(F.linear, weight=self._copy("score.weight").float())
        if not self._batch_invariant:
            return head
        return RowBlocks(head, probe_rows(self._spec.hidden_size, torch.float32))

    def _prefix(self, index: int) -> str:
        """Return how the names of a layer's tensors begin; layers are counted in this stage."""
        return f"model.layers.{self._stage.layers[index]}."

    def _layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, self._prefix(index)
        norms = {name: self._norm(prefix + name) for name in layer_norms(spec)}
        sparse = self._sparse_mlp(prefix + "mlp.") if spec.is_sparse(index) else None
        if sparse is None:
            mlp = self._mlp(prefix + "mlp.", spec.intermediate_size)
        elif self._expert_group is None and self._bank is None:
            mlp = self._by_rows(sparse, spec.hidden_size)
        else:  # with adapters each part computes rows by themselves
            mlp = sparse
        rope = spec.ropes[index]
        return LayerWeights(
            attention_norm=norms.get("attention_norm"),
            attention=self._attention(prefix + "self_attn.", norms.get("attention_output_norm")),
            mlp_norm=norms.get("mlp_norm"),
            mlp=self._added(mlp, norms.get("mlp_output_norm")),
            window=spec.windows[index],
            rope=None if rope is None else spec.distinct_ropes.index(rope),
            is_parallel=spec.block == "parallel",
            sparse=sparse,
        )

    def _norm(self, name: str) -> Rows:
        return prepare_norm(self._spec.norm, self._copy(name + ".weight"))

    def _added(self, block: Rows, norm: Rows | None) -> Rows:
        """Return what is added of a block: the sum of its parts, if it is cut, normed, scaled."""
        if self._shard is not None:
            block = SummedOver(self._shard.group, block)
        if norm is not None:
            block = Chain(block, norm)
        return scaled(block, self._spec.residual_scale)

    def _attention(self, prefix: str, output_norm: Rows | None) -> AttentionWeights:
        spec = self._spec
        projections = [f"{prefix}{name}_proj" for name in "qkv"]
        bias = [f"{name}.bias" for name in projections] if spec.qkv_bias else []
        qk_norm = None
        if spec.qk_norm != "none":
            query, key = (self._copy(f"{prefix}{name}_norm.weight") for name in "qk")
            qk_norm = prepare_qk_norm(spec, query, key)
        output = self._linear(
            prefix + "o_proj.weight", bias=[prefix + "o_proj.bias"] if spec.output_bias else []
        )
        qkv = self._linear(*(f"{name}.weight" for name in projections), bias=bias)
        widths = [spec.query_size, spec.kv_size, spec.kv_size]
        return AttentionWeights(
            qkv=self._adapted(qkv, projections, widths, spec.hidden_size),
            output=self._added(
                self._adapted(output, [prefix + "o_proj"], [spec.hidden_size], spec.query_size),
                output_norm,
            ),
            qk_norm=qk_norm,
            sinks=self._copy(prefix + "sinks").float() if spec.attention_sinks else None,
        )

    def _mlp(self, prefix: str, inner: int) -> Rows:
        spec, gate = self._spec, gated(self._spec)
        names = [prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj"]
        bias = [f"{name}.bias" for name in names] if spec.mlp_bias else []
        gate_up = self._linear(f"{names[0]}.weight", f"{names[1]}.weight", bias=bias[:2])
        down = self._linear(f"{names[2]}.weight", bias=bias[2:])
        if self._bank is None:
            return self._by_rows(Expert(gate_up, down, gate), spec.hidden_size)
        hidden = spec.hidden_size
        return Expert(
            self._adapted(gate_up, names[:2], [inner, inner], hidden),
            self._adapted(down, names[2:], [hidden], inner),
            self._by_rows(Chain(gate), 2 * inner),
        )

    def _adapted(self, product: Linear, names: list[str], widths: list[int], inputs: int) -> Linear:
        """Return a product of rows [rows, inputs], with adapters where there may be some.

        Args:
            names: the modules that its outputs consist of.
            widths: how many outputs of each are here.
        """
        product = self._by_rows(product, inputs)
        if self._bank is None:
            return product
        return self._bank.linear(product, names, widths, inputs)

    def _sparse_mlp(self, prefix: str) -> SparseMlp:
        moe = self._spec.moe
        assert moe is not None
        router, shared = self._router(moe, prefix), None
        if moe.shared_size:
            shared = self._mlp(prefix + "shared_experts.", moe.shared_size)
        if self._expert_group is None:
            return SparseMlp(router, self._experts(moe, prefix), shared)
        spread = SpreadExperts(self._expert_group)
        self._hold_share(spread, prefix)
        return SparseMlp(router, spread, shared)

    def _router(self, moe: MoeSpec, prefix: str) -> Router | SigmoidRouter:
        # Choices between experts turn on small differences, and the product is a small one.
        bias = self._copy(prefix + "router.bias") if moe.bias else None
        score = prepare_linear(self._copy(prefix + "router.weight"), bias)
        if self._bank is not None:
            names, hidden = [prefix + "router"], self._spec.hidden_size
            score = self._adapted(score, names, [moe.num_experts], hidden)
        if moe.scoring == "softmax":
            return Router(score, moe.experts_per_token, normalize=moe.normalize_weights)
        correction = self._checkpoint.tensor(prefix + "router.correction")
        correction = correction.to(self._device, torch.float32, copy=True)
        if self._bank is None:  # which computes in the model's type
            exact = prepare_linear(self._copy(prefix + "router.weight").float())
            score = Chain(torch.Tensor.float, exact)
        return SigmoidRouter(score, correction, moe)

    def _hold_share(self, spread: SpreadExperts, prefix: str) -> None:
        assert self._place is not None
        assert self._spec.moe is not None
        share = expert_share(self._spec.moe.num_experts, self._place.position, self._place.size)
        spread.hold(share, lambda number: self._expert(prefix, number))

    def _expert(self, prefix: str, number: int) -> Linear:
        spec, gate = self._spec, gated(self._spec)
        names = [f"{prefix}experts.{number}.{part}_proj" for part in ("gate", "up", "down")]
        assert spec.moe is not None
        bias = [f"{name}.bias" for name in names] if spec.moe.bias else []
        gate_up = self._linear(f"{names[0]}.weight", f"{names[1]}.weight", bias=bias[:2])
        down = self._linear(f"{names[2]}.weight", bias=bias[2:])
        if self._bank is None or self._expert_group is not None:
            return self._by_rows(Expert(gate_up, down, gate), spec.hidden_size)
        hidden, inner = spec.hidden_size, spec.moe.intermediate_size
        return Expert(
            self._bank.expert(self._by_rows(gate_up, hidden), names[:2], [inner, inner]),
            self._bank.expert(self._by_rows(down, inner), names[2:], [hidden]),
            self._by_rows(Chain(gate), 2 * inner),
        )

    def _by_rows(self, function: Linear, width: int) -> Linear:
        """Return a function of rows [rows, width] that computes each by itself, if so wished."""
        if not self._batch_invariant:
            return function
        return RowBlocks(function, probe_rows(width, self._types.activations))

    def _experts(self, moe: MoeSpec, prefix: str) -> Experts:
        hidden, inner = self._spec.hidden_size, moe.intermediate_size
        num_bytes = 3 * moe.num_experts * hidden * inner * self._types.activations.itemsize
        suits = StackedExperts.suits(moe.num_experts, moe.experts_per_token, num_bytes)
        if not suits or moe.bias or moe.is_mxfp4 or self._bank is not None:
            experts = [self._expert(prefix, i) for i in range(moe.num_experts)]
            return GroupedExperts(experts, self._bank)
        each = [f"{prefix}experts.{i}." for i in range(moe.num_experts)]
        gate_up = [self._fused([f"{p}gate_proj.weight", f"{p}up_proj.weight"]) for p in each]
        down = [self._copy(f"{p}down_proj.weight").T for p in each]
        return StackedExperts(torch.stack(gate_up), torch.stack(down), gated(self._spec))

    def _linear(self, *names: str, bias: list[str] | None = None) -> Linear:
        added = self._fused(bias) if bias else None
        if self._quantization != "int8":
            packed = self._stored_mxfp4(list(names))
            if packed is not None:
                return Mxfp4Linear(packed, added, self._types.activations)
        if self._quantization != "int4":
            return self._prepare(self._fused(list(names)), added)
        weights = self._stored_int4(list(names))
        if weights is None:
            whole = self._fused(list(names))
            weights = quantized(whole)
            if weights is None or not fits_int4(weights):
                return self._prepare(whole, added)
        return Int4Linear(weights, added, self._types.activations)

    def _stored_int4(self, names: list[str]) -> Int4Weights | None:
        """Return weights one below the other, if they are stored in 4 bits that can be used."""
        stored = [self._checkpoint.int4(name) for name in names]
        known = [weights for weights in stored if weights is not None]
        whole = joined(known) if len(known) == len(names) else None
        return whole if whole is not None and fits_int4(whole) else None

    def _stored_mxfp4(self, names: list[str]) -> Mxfp4Weights | None:
        """Return weights one below the other, if they are stored in blocks of 4-bit floats."""
        stored = [self._checkpoint.mxfp4(name) for name in names]
        parts = [weights for weights in stored if weights is not None]
        if len(parts) < len(names):
            return None
        return Mxfp4Weights(
            *(torch.cat(each).to(self._device) for each in zip(*parts, strict=True))
        )

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
