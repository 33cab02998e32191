"""The decoder: embeddings, layers of attention and MLP over a paged KV cache, and the LM head."""

from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from engine.models.attention.paged import write_keys_values
from engine.models.attention.plan import AttentionRows
from engine.models.attention.rotary import rotate, rotation
from engine.models.attention.varlen import Attention
from engine.models.layers import Rows
from engine.models.moe import SparseMlp
from engine.models.parallel.experts import ExpertGroup
from engine.models.spec import ModelSpec


class AttentionWeights(msgspec.Struct, frozen=True):
    """Projections of one attention block, queries, keys and values fused in that order."""

    qkv: Rows
    output: Rows
    qk_norm: Rows | None
    """Of [tokens, heads + kv_heads, head_dim]."""


class LayerWeights(msgspec.Struct, frozen=True):
    """One decoder layer; its blocks include what is done to results before these are added."""

    attention_norm: Rows | None
    attention: AttentionWeights
    mlp_norm: Rows | None
    mlp: Rows
    window: int | None
    rope: int | None
    """Which of the model's rotary tables; None for a layer that does not know positions."""
    is_parallel: bool = False
    """Whether the MLP sees what attention sees."""
    sparse: SparseMlp | None = None
    """What in `mlp` has the experts, if it has some."""


class DecoderWeights(msgspec.Struct, frozen=True):
    """All weights of a model."""

    embedding: Tensor
    """[vocab, hidden], or the part of it that is here"""
    embed: Rows
    """From token ids [tokens] to [tokens, hidden]."""
    layers: list[LayerWeights]
    norm: Rows
    lm_head: Rows
    rotary: list[Tensor]
    """Each [max_model_len, 2, head_dim / 2], see `engine.models.attention.rotary.rotary_table`."""


class FinalTokens(msgspec.Struct, frozen=True):
    """Those tokens of a step whose states anyone looks at after the last layer."""

    tokens: Tensor
    """[final] int64: index among the tokens of the step."""
    plan: Any
    """How they attend in the last layer, each as a row of its own."""


class StepTokens(msgspec.Struct, frozen=True):
    """The tokens of one step, rows one after the other."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64"""
    slots: Tensor
    """[tokens] int64: flat cache slot (block * block_size + offset) that each token fills."""
    rows: AttentionRows
    """What the plans were made for."""
    plans: dict[int | None, Any]
    """How to attend, per sliding window that some layer has; made by the model's attention."""
    final: FinalTokens | None = None
    """None if all states are needed."""


class Followers(Protocol):
    """Processes that compute the same with other parts of the weights; told before each part."""

    def forward(self, step: StepTokens) -> None:
        """Have them run all layers on these tokens."""
        ...

    def logits(self, hidden: Tensor) -> None:
        """Have them compute logits of these states [rows, hidden]."""
        ...


class Decoder:
    """A model replica on one device; all state lives in the KV cache that it is given."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: Attention,
        cache_dtype: torch.dtype,
        expert_group: ExpertGroup | None = None,
        followers: Followers | None = None,
    ) -> None:
        """Take the weights, with an expert group only those experts that this engine has.

        Followers hold the other parts of a model that is cut over several processes.
        """
        self.cache_dtype = cache_dtype
        """Type of keys and values."""
        self._followers = followers
        self.spec = spec
        self.attention = attention
        self.expert_group = expert_group
        self._weights = weights
        self._qk_size = spec.query_size + spec.kv_size
        self._qk_heads = spec.num_heads + spec.num_kv_heads

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows for which `StepTokens.plans` needs a plan."""
        return set(self.spec.windows)

    @property
    def is_alone(self) -> bool:
        """Whether a step needs no other process."""
        return self._followers is None and self.expert_group is None

    @property
    def sparse_layers(self) -> dict[int, SparseMlp]:
        """The layers with experts, by number."""
        layers = enumerate(self._weights.layers)
        return {i: layer.sparse for i, layer in layers if layer.sparse is not None}

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    @property
    def last_window(self) -> int | None:
        """The sliding window of the last layer."""
        return self.spec.windows[-1]

    def hidden_states(self, step: StepTokens, cache: list[Tensor]) -> Tensor:
        """Run all layers, filling the cache, and return normalized states [tokens, hidden].

        If the step names final tokens these are their states only: what comes after the keys and
        values of the last layer is not computed of the others.

        Raises:
            GroupBroken: an engine that holds some of the experts has failed.
        """
        if self.expert_group is not None:
            self.expert_group.begin_step(len(step.token_ids))
        if self._followers is not None:
            self._followers.forward(step)
        x = self._weights.embed(step.token_ids)
        rotations = [rotation(table, step.positions) for table in self._weights.rotary]
        last = self._weights.layers[-1]
        for layer, layer_cache in zip(self._weights.layers, cache, strict=True):
            final = step.final if layer is last else None
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            rotated = None if layer.rope is None else rotations[layer.rope]
            queries = self._write_and_query(layer.attention, normed, layer_cache, step, rotated)
            plan = step.plans[layer.window]
            if final is not None:
                x, queries = (each.index_select(0, final.tokens) for each in (x, queries))
                if layer.is_parallel:
                    normed = normed.index_select(0, final.tokens)
                plan = final.plan
            if len(x):
                attended = self.attention.attend(queries, layer_cache, plan)
                x += layer.attention.output(attended.to(x.dtype))
                if not layer.is_parallel:
                    normed = x if layer.mlp_norm is None else layer.mlp_norm(x)
                x += layer.mlp(normed)
        return self._weights.norm(x)

    def dummy_step(self) -> None:
        """Run the experts that are here for the other engines of the group, if there is one.

        Raises:
            GroupBroken: one of them has failed.
        """
        if self.expert_group is None or not self.expert_group.begin_step(0):
            return
        nothing = self._weights.embedding.new_empty(0, self.spec.hidden_size)
        for mlp in self.sparse_layers.values():
            mlp(nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] for normalized states [rows, hidden]."""
        if self._followers is not None:
            self._followers.logits(hidden)
        return self._weights.lm_head(hidden)

    def _write_and_query(
        self,
        weights: AttentionWeights,
        x: Tensor,
        cache: Tensor,
        step: StepTokens,
        rotated: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Store keys and values of normalized states; return queries [tokens, heads, head_dim]."""
        spec = self.spec
        tokens = x.shape[0]
        qkv = weights.qkv(x)
        heads = target = qkv[:, : self._qk_size].view(tokens, self._qk_heads, spec.head_dim)
        if weights.qk_norm is not None:
            heads = weights.qk_norm(heads)
        if rotated is not None:
            rotate(heads, *rotated, out=target)
        elif heads is not target:
            target.copy_(heads)
        qkv = qkv.to(cache.dtype)
        keys_values = qkv[:, spec.query_size :]
        write_keys_values(
            cache, step.slots, keys_values.view(tokens, 2, spec.num_kv_heads, spec.head_dim)
        )
        return qkv[:, : spec.query_size].view(tokens, spec.num_heads, spec.head_dim)
