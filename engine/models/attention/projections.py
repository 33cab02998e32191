"""From a layer's states to queries, and to what the KV cache keeps of each token.

Most models keep keys and values of some heads. Multi-head latent attention (DeepSeek-V2, arXiv
2405.04434) keeps one vector for all heads: a latent, of which each head would make its keys and
values by a product, and a key that is rotated. Here queries and results go through those products
instead, so that attention has a single key a token, which is the value besides.
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


class LayerPlace(NamedTuple):
    """What a layer's attention takes of a step."""

    window: int | None
    """Sliding window, which says which of the step's plans."""
    rope: int | None
    """Index of the model's rotary table; None for a layer without positions."""
    group: int = 0
    """The cache group, which has KV blocks of its own."""
    is_tempered: bool = False
    """Whether queries are multiplied by the temperatures of their positions."""


class SelfAttention(Module):
    """From normalized states to what a layer's attention adds to the states."""

    sinks: Tensor | None
    """[heads] float32: scores beside those of the keys, where there are some."""

    def __init__(self, place: LayerPlace, kv_format: KvFormat, output: Rows) -> None:
        """Take what maps attended values [tokens, heads * head_dim] to [tokens, hidden]."""
        super().__init__()
        self.place = place
        self._kv = kv_format
        self.o_proj = output
        self.register_buffer("sinks", None)

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Store what the cache keeps of states; return queries [tokens, heads, head_dim].

        Args:
            x: normalized states [tokens, hidden]
            cache: this layer's
            slots: [tokens] where in it each token goes
            rotated: by the tokens' positions; None in a layer that does not know them
        """
        raise NotImplementedError

    def forward(
        self, x: Tensor, cache: Tensor, context: ForwardContext, final: FinalTokens | None
    ) -> Tensor:
        """Store keys and values, attend; return [tokens, hidden], of final tokens if given some."""
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
        """Add with the last product, where that can."""
        attended = self._attended(x, cache, context, final)
        return add_to(sums, self.o_proj, attended) if attended.shape[0] else sums

    def _attended(
        self, x: Tensor, cache: Tensor, context: ForwardContext, final: FinalTokens | None
    ) -> Tensor:
        place, step = self.place, context.step
        part = step.others[place.group - 1] if place.group else step
        rotated = None if place.rope is None else context.rotations[place.rope]
        queries = self.write_and_query(x, cache, part.slots, rotated)
        if place.is_tempered and context.temperatures is not None:
            queries = (queries * context.temperatures).to(queries.dtype)
        plan = part.plans[place.window]
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
        """Replace what tokens of images have attended to by what they see of all of them."""
        if images.whole is None:
            return
        assert context.image_attention is not None, "the model's images have plans of their own"
        own = queries.index_select(0, images.whole.queries)
        plan = images.whole.plans[self.place.group][self.place.window]
        within = context.image_attention.attend(own, cache, plan)
        within = within.index_select(0, images.whole.computed)
        attended.index_copy_(0, images.tokens, within.to(attended.dtype))


class HeadProjections(SelfAttention):
    """Queries, keys and values of heads, fused in that order."""

    def __init__(
        self,
        spec: ModelSpec,
        place: LayerPlace,
        qkv: Rows,
        output: Rows,
        kv_format: KvFormat,
        kernels: FusedKernels | None = None,
        qk_norm: Rows | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Take the parts; `qk_norm` is of [tokens, heads + kv_heads, head_dim].

        A fused kernel rotates and stores where there is one for the format.
        """
        super().__init__(place, kv_format, output)
        is_plain = isinstance(kv_format, PlainKv) and kv_format.dtype.itemsize == 2
        self._kernels = kernels if is_plain else None
        self.sinks = sinks
        self.qkv_proj = qkv
        self.qk_norm = qk_norm
        self._query_size = spec.query_size
        self._queries = (spec.num_heads, spec.head_dim)
        self._kept = spec.kv_shape
        self._rotated = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self._rotated_size = spec.query_size + spec.kv_size

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Do so with one product for queries, keys and values."""
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
        self._kv.write(cache, slots, keys_values.view(tokens, *self._kept))
        return qkv[:, : self._query_size].view(tokens, *self._queries)


class LatentProjections(SelfAttention):
    """A latent and a rotated key of each token, and queries of these."""

    def __init__(
        self,
        spec: ModelSpec,
        place: LayerPlace,
        inputs: Rows,
        *,
        queries: Rows | None,
        norm: Rows,
        to_latent: Rows,
        output: Rows,
        kv_format: KvFormat,
    ) -> None:
        """Take the parts; those of a process with some of the heads know only these.

        Args:
            inputs: from states to queries (or what `queries` makes some of), latent and key.
            queries: from the first of these to queries, if they are compressed, too.
            norm: of latents.
            to_latent: from the part of queries that is not rotated to queries of latents.
            output: from weighted sums of latents on.
            kv_format: of the KV cache.
        """
        super().__init__(place, kv_format, output)
        assert spec.latent is not None
        self._latent: LatentSpec = spec.latent
        self._heads = spec.num_heads
        self._width = spec.head_dim
        self._kept = spec.kv_shape
        self.qkv_a_proj = inputs
        self.q_b_proj = queries
        self.kv_a_norm = norm
        self.k_b_proj = to_latent

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Do the same with latents and rotated keys; return queries of both."""
        assert rotated is not None, "a part of each head knows positions"
        spec, tokens, rank = self._latent, x.shape[0], self._latent.rank
        made = self.qkv_a_proj(x)
        first = made.shape[1] - rank - spec.rotated_size
        query, latent, key = torch.split(made, [first, rank, spec.rotated_size], dim=1)
        if self.q_b_proj is not None:
            query = self.q_b_proj(query.contiguous())
        heads = query.view(tokens, self._heads, -1)
        plain, turned = torch.split(heads, [spec.plain_size, spec.rotated_size], dim=2)
        turned = rotate(torch.cat((turned, key.unsqueeze(1)), dim=1), *rotated)
        kept = x.new_empty(tokens, self._width, dtype=self._kv.dtype)
        kept[:, :rank] = self.kv_a_norm(latent.contiguous())
        kept[:, rank:] = turned[:, -1]
        self._kv.write(cache, slots, kept.view(tokens, *self._kept))
        queries = x.new_empty(tokens, self._heads, self._width, dtype=self._kv.dtype)
        queries[..., :rank] = self.k_b_proj(plain.flatten(1)).view(tokens, self._heads, rank)
        queries[..., rank:] = turned[:, :-1]
        return queries


class HeadwiseProduct(Module):
    """A product of each head with weights of its own."""

    def __init__(self, weight: Tensor) -> None:
        """Take weights [heads, in, out]."""
        super().__init__()
        self.weight = weight_of(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, heads * width] to [rows, heads * out]; the first `in` of a width count."""
        heads, used, _ = self.weight.shape
        parts = x.view(x.shape[0], heads, -1)[..., :used].transpose(0, 1)
        return torch.bmm(parts, self.weight).transpose(0, 1).reshape(x.shape[0], -1)
