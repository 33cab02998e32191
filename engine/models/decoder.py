"""The decoder: embeddings, layers of attention and MLP over a paged KV cache, and the LM head."""

from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.attention import AttentionPlan, PagedAttention, write_keys_values
from engine.models.hf_config import ModelSpec
from engine.models.layers import Linear, rms_norm, rms_norm_heads
from engine.models.rotary import rotate, rotation


class AttentionWeights(msgspec.Struct, frozen=True):
    """Projections of one attention block, queries, keys and values fused in that order."""

    qkv: Linear
    output: Linear
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]"""


class LayerWeights(msgspec.Struct, frozen=True):
    """One decoder layer."""

    input_norm: Tensor
    attention: AttentionWeights
    mlp_norm: Tensor
    mlp: Callable[[Tensor], Tensor]
    window: int | None


class DecoderWeights(msgspec.Struct, frozen=True):
    """All weights of a model."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Linear
    rotary: Tensor
    """[max_model_len, 2, head_dim / 2], see `engine.models.rotary.rotary_table`."""


class StepTokens(msgspec.Struct, frozen=True):
    """The tokens of one step, rows one after the other."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64"""
    slots: Tensor
    """[tokens] int64: flat cache slot (block * block_size + offset) that each token fills."""
    plans: dict[int | None, AttentionPlan]
    """How to attend, per sliding window that some layer has."""


class Decoder:
    """A model replica on one device; all state lives in the KV cache that it is given."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, attention: PagedAttention) -> None:
        self.spec = spec
        self.attention = attention
        self._weights = weights
        self._qk_size = spec.query_size + spec.kv_size
        self._qk_heads = spec.num_heads + spec.num_kv_heads

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows for which `StepTokens.plans` needs a plan."""
        return set(self.spec.windows)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and of the KV cache."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    def hidden_states(self, step: StepTokens, cache: list[Tensor]) -> Tensor:
        """Run all layers, filling the cache, and return the normalized states [tokens, hidden]."""
        x = F.embedding(step.token_ids, self._weights.embedding)
        cos, sin = rotation(self._weights.rotary, step.positions)
        eps = self.spec.rms_norm_eps
        for layer, layer_cache in zip(self._weights.layers, cache, strict=True):
            normed = rms_norm(x, layer.input_norm, eps)
            x += self._attend(layer, normed, layer_cache, step, cos, sin)
            x += layer.mlp(rms_norm(x, layer.mlp_norm, eps))
        return rms_norm(x, self._weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] for normalized states [rows, hidden]."""
        return self._weights.lm_head(hidden)

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,
        cache: Tensor,
        step: StepTokens,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        spec, weights = self.spec, layer.attention
        tokens = x.shape[0]
        qkv = weights.qkv(x)
        heads = qkv[:, : self._qk_size].view(tokens, self._qk_heads, spec.head_dim)
        if weights.qk_norm is not None:
            heads = rms_norm_heads(heads, weights.qk_norm, spec.rms_norm_eps)
        heads = rotate(heads, cos, sin)
        values = qkv[:, self._qk_size :].view(tokens, spec.num_kv_heads, spec.head_dim)
        write_keys_values(cache, step.slots, heads[:, spec.num_heads :], values)
        queries = heads[:, : spec.num_heads]
        return weights.output(self.attention.attend(queries, cache, step.plans[layer.window]))
