"""Projections from a layer's states to queries and to the KV cache's contents.

Most models cache keys and values per head. Multi-head latent attention (DeepSeek-V2, arXiv
2405.04434) caches one vector for all heads: a latent, from which each head would project its keys
and values, and a rotated key. Here queries and results go through those projections instead, so
attention has a single key per token, which is also its value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.reference import rotate
from engine.kernels.registry import FusedKernels
from engine.models.attention.kv_format import KvFormat, PlainKv
from engine.models.attention.rotary import Rotation
from engine.models.module import Module, Rows, add_to, weight_of
from engine.models.spec import LatentSpec, ModelSpec
from engine.models.step import FinalTokens, ForwardContext, ImageTokens


class LayerSettings(NamedTuple):
    """Which of a step's tensors a layer's attention uses."""

    window: int | None
    """Sliding window; selects the step's attention plan."""
    rope: int | None
    """Index of the model's rotary table; None for a layer without positional encoding."""
    group: int = 0
    """Cache group, which has its own KV blocks."""
    is_tempered: bool = False
    """Whether queries are multiplied by position-dependent temperatures."""


class SelfAttention(Module):
    """Maps normalized states to the attention output that is added to the residual."""

    sinks: Tensor | None
    """[heads] float32: extra softmax scores without a value; None if the model has none."""

    def __init__(self, settings: LayerSettings, kv_format: KvFormat, output: Rows) -> None:
        """Initialize from the output projection, [tokens, heads * head_dim] to [tokens, hidden]."""
        super().__init__()
        self.settings = settings
        self._kv = kv_format
        self.o_proj = output
        self.register_buffer("sinks", None)

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Write the states' cache entries; return queries [tokens, heads, head_dim].

        Args:
            x: normalized states [tokens, hidden]
            cache: this layer's cache
            slots: [tokens] slot of each token in the cache
            rotated: rotation factors of the tokens' positions; None without positional encoding
        """
        raise NotImplementedError

    def forward(
        self, x: Tensor, cache: Tensor, context: ForwardContext, final: FinalTokens | None
    ) -> Tensor:
        """Write keys and values, and attend; return [tokens, hidden] (if given, final tokens)."""
        attended = self._attended(x, cache, context, final)
        return self.o_proj(attended) if attended.shape[0] else x[:0]

    def add_to(
        self,
        sums: Tensor,
        x: Tensor,
        cache: Tensor,
        context: ForwardContext,
        final: FinalTokens | None,
    ) -> Tensor:
        """Add the attention output to `sums`, fused with the output projection if supported."""
        attended = self._attended(x, cache, context, final)
        return add_to(sums, self.o_proj, attended) if attended.shape[0] else sums

    def _attended(
        self, x: Tensor, cache: Tensor, context: ForwardContext, final: FinalTokens | None
    ) -> Tensor:
        settings, step = self.settings, context.step
        part = step.others[settings.group - 1] if settings.group else step
        rotated = None if settings.rope is None else context.rotations[settings.rope]
        queries = self.write_and_query(x, cache, part.slots, rotated)
        if settings.is_tempered and context.temperatures is not None:
            queries = (queries * context.temperatures).to(queries.dtype)
        plan = part.plans[settings.window]
        if final is not None:
            queries, plan = queries.index_select(0, final.tokens), final.plan
            if step.adapters is not None and context.adapters is not None:
                context.adapters.current = step.adapters.select(final.tokens)
            if not queries.shape[0]:
                return queries
        attended = context.attention.attend(queries, cache, plan, self.sinks)
        if step.images is not None and final is None:
            self._attend_within(attended, queries, cache, context, step.images)
        return attended.to(x.dtype)

    def _attend_within(
        self,
        attended: Tensor,
        queries: Tensor,
        cache: Tensor,
        context: ForwardContext,
        images: ImageTokens,
    ) -> None:
        """Overwrite image tokens' results with bidirectional attention within their image."""
        if images.whole is None:
            return
        assert context.image_attention is not None, "the model's images have plans of their own"
        own = queries.index_select(0, images.whole.queries)
        plan = images.whole.plans[self.settings.group][self.settings.window]
        within = context.image_attention.attend(own, cache, plan)
        within = within.index_select(0, images.whole.computed)
        attended.index_copy_(0, images.tokens, within.to(attended.dtype))


class HeadProjections(SelfAttention):
    """Queries, keys and values from one projection, in that order."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: LayerSettings,
        qkv: Rows,
        output: Rows,
        kv_format: KvFormat,
        kernels: FusedKernels | None = None,
        qk_norm: Rows | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Initialize from the layers; `qk_norm` normalizes [tokens, heads + kv_heads, head_dim].

        Rotation and storing use a fused kernel if one supports the format.
        """
        super().__init__(settings, kv_format, output)
        is_plain = isinstance(kv_format, PlainKv) and kv_format.dtype.itemsize == 2
        self._kernels = kernels if is_plain else None
        self.sinks = sinks
        self.qkv_proj = qkv
        self.qk_norm = qk_norm
        self._query_size = spec.query_size
        self._queries = (spec.num_heads, spec.head_dim)
        self._kv_shape = spec.kv_shape
        self._rotated = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self._rotated_size = spec.query_size + spec.kv_size

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Project queries, keys and values at once, rotate them, and write keys and values."""
        tokens = x.shape[0]
        qkv = self.qkv_proj(x)
        heads = target = qkv[:, : self._rotated_size].view(tokens, *self._rotated)
        if self.qk_norm is not None:
            heads = self.qk_norm(heads)
        if rotated is not None and self._kernels is not None and qkv.is_contiguous():
            if heads is not target:
                target.copy_(heads)
            self._kernels.rotate_and_store(qkv, *rotated, cache, slots)
            return qkv[:, : self._query_size].view(tokens, *self._queries)
        if rotated is not None:
            rotate(heads, *rotated, out=target)
        elif heads is not target:
            target.copy_(heads)
        qkv = qkv.to(self._kv.dtype)
        keys_values = qkv[:, self._query_size :]
        self._kv.write(cache, slots, keys_values.view(tokens, *self._kv_shape))
        return qkv[:, : self._query_size].view(tokens, *self._queries)


class LatentProjections(SelfAttention):
    """Caches a latent and a rotated key per token; queries attend to both."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: LayerSettings,
        inputs: Rows,
        *,
        queries: Rows | None,
        norm: Rows,
        to_latent: Rows,
        output: Rows,
        kv_format: KvFormat,
    ) -> None:
        """Initialize from the layers; in a tensor-parallel process, those of its own heads.

        Args:
            inputs: projects states to queries (or to the input of `queries`), latent and key.
            queries: projects compressed queries to full ones; None if they are not compressed.
            norm: normalizes latents.
            to_latent: projects the non-rotated part of queries to the latent space.
            output: projects weighted sums of latents to states.
            kv_format: format of the KV cache.
        """
        super().__init__(settings, kv_format, output)
        assert spec.latent is not None
        self._latent: LatentSpec = spec.latent
        self._heads = spec.num_heads
        self._width = spec.head_dim
        self._kv_shape = spec.kv_shape
        self.qkv_a_proj = inputs
        self.q_b_proj = queries
        self.kv_a_norm = norm
        self.k_b_proj = to_latent

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Write latents and rotated keys; return queries for both."""
        assert rotated is not None, "a part of each head knows positions"
        spec, tokens, rank = self._latent, x.shape[0], self._latent.rank
        projected = self.qkv_a_proj(x)
        first = projected.shape[1] - rank - spec.rotated_size
        query, latent, key = torch.split(projected, [first, rank, spec.rotated_size], dim=1)
        if self.q_b_proj is not None:
            query = self.q_b_proj(query.contiguous())
        heads = query.view(tokens, self._heads, -1)
        plain, turned = torch.split(heads, [spec.plain_size, spec.rotated_size], dim=2)
        turned = rotate(torch.cat((turned, key.unsqueeze(1)), dim=1), *rotated)
        entries = x.new_empty(tokens, self._width, dtype=self._kv.dtype)
        entries[:, :rank] = self.kv_a_norm(latent.contiguous())
        entries[:, rank:] = turned[:, -1]
        self._kv.write(cache, slots, entries.view(tokens, *self._kv_shape))
        queries = x.new_empty(tokens, self._heads, self._width, dtype=self._kv.dtype)
        queries[..., :rank] = self.k_b_proj(plain.flatten(1)).view(tokens, self._heads, rank)
        queries[..., rank:] = turned[:, :-1]
        return queries


class HeadwiseProduct(Module):
    """A per-head product, with separate weights for each head."""

    def __init__(self, weight: Tensor) -> None:
        """Initialize from weights [heads, in, out]."""
        super().__init__()
        self.weight = weight_of(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, heads * width] to [rows, heads * out], using the first `in` of each width."""
        heads, used, _ = self.weight.shape
        parts = x.view(x.shape[0], heads, -1)[..., :used].transpose(0, 1)
        return torch.bmm(parts, self.weight).transpose(0, 1).reshape(x.shape[0], -1)
