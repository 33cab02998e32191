"""From a layer's states to queries, and to what the KV cache keeps of each token.

Most models keep keys and values of some heads. Multi-head latent attention (DeepSeek-V2, arXiv
2405.04434) keeps one vector for all heads: a latent, of which each head would make its keys and
values by a product, and a key that is rotated. Here queries and results go through those products
instead, so that attention has a single key a token, which is the value besides.
"""

import torch
from torch import Tensor

from engine.kernels.reference import rotate
from engine.kernels.registry import FusedKernels
from engine.models.attention.kv_format import KvFormat, PlainKv
from engine.models.layers import Rows
from engine.models.spec import LatentSpec, ModelSpec

Rotation = tuple[Tensor, Tensor]
"""Factors of `engine.models.attention.rotary.rotate`."""


class HeadProjections:
    """Queries, keys and values of heads, fused in that order."""

    def __init__(
        self,
        spec: ModelSpec,
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
        is_plain = isinstance(kv_format, PlainKv) and kv_format.dtype.itemsize == 2
        self._kernels = kernels if is_plain else None
        self._kv = kv_format
        self.output = output
        """From what attention returns, [tokens, heads * head_dim], to what the layer adds."""
        self.sinks = sinks
        """[heads] float32: scores beside those of the keys, where there are some."""
        self._qkv = qkv
        self._qk_norm = qk_norm
        self._query_size = spec.query_size
        self._queries = (spec.num_heads, spec.head_dim)
        self._kept = spec.kv_shape
        self._rotated = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self._rotated_size = spec.query_size + spec.kv_size

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
        tokens = len(x)
        qkv = self._qkv(x)
        heads = target = qkv[:, : self._rotated_size].view(tokens, *self._rotated)
        if self._qk_norm is not None:
            heads = self._qk_norm(heads)
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


class LatentProjections:
    """A latent and a rotated key of each token, and queries of these."""

    sinks = None

    def __init__(
        self,
        spec: ModelSpec,
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
        assert spec.latent is not None
        self.output = output
        self._latent: LatentSpec = spec.latent
        self._heads = spec.num_heads
        self._width = spec.head_dim
        self._kept = spec.kv_shape
        self._inputs = inputs
        self._kv = kv_format
        self._queries = queries
        self._norm = norm
        self._to_latent = to_latent

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, rotated: Rotation | None
    ) -> Tensor:
        """Do the same with latents and rotated keys; return queries of both."""
        assert rotated is not None, "a part of each head knows positions"
        spec, tokens, rank = self._latent, len(x), self._latent.rank
        made = self._inputs(x)
        first = made.shape[1] - rank - spec.rotated_size
        query, latent, key = torch.split(made, [first, rank, spec.rotated_size], dim=1)
        if self._queries is not None:
            query = self._queries(query.contiguous())
        heads = query.view(tokens, self._heads, -1)
        plain, turned = torch.split(heads, [spec.plain_size, spec.rotated_size], dim=2)
        turned = rotate(torch.cat((turned, key.unsqueeze(1)), dim=1), *rotated)
        kept = x.new_empty(tokens, self._width, dtype=self._kv.dtype)
        kept[:, :rank] = self._norm(latent.contiguous())
        kept[:, rank:] = turned[:, -1]
        self._kv.write(cache, slots, kept.view(tokens, *self._kept))
        queries = x.new_empty(tokens, self._heads, self._width, dtype=self._kv.dtype)
        queries[..., :rank] = self._to_latent(plain.flatten(1)).view(tokens, self._heads, rank)
        queries[..., rank:] = turned[:, :-1]
        return queries


Projections = HeadProjections | LatentProjections
"""What surrounds one layer's attention."""


class HeadwiseProduct:
    """A product of each head with weights of its own."""

    def __init__(self, weight: Tensor) -> None:
        """Take weights [heads, in, out]."""
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, heads * width] to [rows, heads * out]; the first `in` of a width count."""
        heads, used, _ = self._weight.shape
        parts = x.view(len(x), heads, -1)[..., :used].transpose(0, 1)
        return torch.bmm(parts, self._weight).transpose(0, 1).reshape(len(x), -1)
