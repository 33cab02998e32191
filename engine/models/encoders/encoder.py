"""The encoder: embeddings and layers over one flat batch of whole sequences, without padding.

Sequences of equal length are adjacent, so that their attention is one call. No state is kept
between steps.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.reference import rotate
from engine.models.attention.rotary import Rotary, Rotation
from engine.models.layers import Embedding
from engine.models.module import Module, Rows

_BLOCK = 256
"""Queries per block in long sequences with local attention."""


class SequenceGroup(msgspec.Struct, frozen=True):
    """Consecutive sequences of equal length in a batch."""

    first: int
    """Index of their first token in the batch."""
    count: int
    length: int


class EncoderBatch(msgspec.Struct, frozen=True):
    """Whole sequences, shortest first."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64, from 0 in each sequence"""
    types: Tensor
    """[tokens] int64: 1 in the second text of a pair"""
    groups: list[SequenceGroup]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [group.length for group in self.groups for _ in range(group.count)]


def groups_of(lengths: list[int]) -> list[SequenceGroup]:
    """Group consecutive sequences of equal length."""
    groups: list[SequenceGroup] = []
    first = 0
    for length, members in groupby(lengths):
        count = len(list(members))
        groups.append(SequenceGroup(first, count, length))
        first += count * length
    return groups


class EncoderLayer(Module):
    """One layer, with norms before each block or after the residual addition."""

    def __init__(
        self,
        *,
        qkv: Rows,
        output: Rows,
        mlp: Rows,
        attention_norm: Rows | None,
        mlp_norm: Rows,
        num_heads: int,
        norm_first: bool,
        rotary: int | None = None,
        max_distance: int | None = None,
        grouping: int = 0,
    ) -> None:
        """Initialize from the modules.

        Args:
            qkv: projects to queries, keys and values, concatenated.
            norm_first: whether norms precede attention and MLP.
            rotary: index of the rotary table; None with embedded positions.
            reach: distance to which a token attends on each side; None for all.
            grouping: index of the grouping that defines which tokens attend to each other.
        """
        super().__init__()
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.output = output
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.rotary = rotary
        self.grouping = grouping
        self._num_heads = num_heads
        self._norm_first = norm_first
        self._max_distance = max_distance

    def forward(self, x: Tensor, groups: list[SequenceGroup], rotated: Rotation | None) -> Tensor:
        """Return the next states of tokens, both [tokens, hidden]."""
        if self._norm_first:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = self._attend(normed, groups, rotated).add_(x)
            return self.mlp(self.mlp_norm(x)).add_(x)
        assert self.attention_norm is not None
        x = self.attention_norm(self._attend(x, groups, rotated).add_(x))
        return self.mlp_norm(self.mlp(x).add_(x))

    def _attend(self, x: Tensor, groups: list[SequenceGroup], rotated: Rotation | None) -> Tensor:
        tokens, width = x.shape
        heads = self._num_heads
        qkv = self.qkv(x).view(tokens, 3, heads, width // heads)
        if rotated is not None:
            qkv[:, :2] = rotate(qkv[:, :2].flatten(1, 2), *rotated).view(tokens, 2, heads, -1)
        attended = x.new_empty(tokens, width)
        for group in groups:
            end = group.first + group.count * group.length
            parts = qkv[group.first : end].view(group.count, group.length, 3, heads, -1)
            queries, keys, values = parts.permute(2, 0, 3, 1, 4)
            result = _attention(queries, keys, values, self._max_distance)
            target = attended[group.first : end].view(group.count, group.length, heads, -1)
            target.copy_(result.transpose(1, 2))
        return self.output(attended)


class EncoderLayers(Module):
    """The layers of a text or vision encoder."""

    def __init__(self, layers: Iterable[EncoderLayer], final_norm: Rows | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm

    def forward(
        self, x: Tensor, groupings: list[list[SequenceGroup]], rotations: list[Rotation]
    ) -> Tensor:
        """Return the final states of embedded tokens, both [tokens, hidden]."""
        for layer in cast("Iterable[EncoderLayer]", self.layers):
            rotated = None if layer.rotary is None else rotations[layer.rotary]
            x = layer(x, groupings[layer.grouping], rotated)
        return x if self.final_norm is None else self.final_norm(x)


class Encoder(Module, finds_hooks=True):
    """A text encoder on one device; stateless."""

    def __init__(
        self,
        *,
        embedding: Tensor,
        positions: Tensor | None,
        types: Tensor | None,
        embedding_norm: Rows,
        layers: EncoderLayers,
        rotary: Iterable[Rotary] = (),
    ) -> None:
        """Initialize from the weights.

        Args:
            embedding: [vocab, hidden]
            positions: [positions, hidden], starting with that of a sequence's first token.
            types: [types, hidden]
        """
        super().__init__()
        self.word_embeddings = Embedding(embedding)
        self.position_embeddings = None if positions is None else Embedding(positions)
        self.token_type_embeddings = None if types is None else Embedding(types)
        self.embedding_norm = embedding_norm
        self.encoder = layers
        self.rotary = nn.ModuleList(rotary)
        self.head: Rows | None = None
        """Classifier, from pooled states to outputs."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.word_embeddings.weight.device

    def forward(self, batch: EncoderBatch) -> Tensor:
        """Return the final states of all tokens, [tokens, hidden]."""
        x = self.word_embeddings(batch.token_ids)
        if self.token_type_embeddings is not None:
            x += self.token_type_embeddings(batch.types)
        if self.position_embeddings is not None:
            x += self.position_embeddings(batch.positions)
        rotations = [rotary(batch.positions) for rotary in self.rotary]
        states: Tensor = self.encoder(self.embedding_norm(x), [batch.groups], rotations)
        return states


def _attention(queries: Tensor, keys: Tensor, values: Tensor, max_distance: int | None) -> Tensor:
    """Attend within sequences [count, heads, length, head_dim], `max_distance` on each side."""
    length = queries.shape[2]
    if max_distance is None or length <= max_distance + 1:
        return F.scaled_dot_product_attention(queries, keys, values)
    results = []
    for first in range(0, length, _BLOCK):
        end = min(first + _BLOCK, length)
        low, high = max(0, first - max_distance), min(length, end + max_distance)
        rows = torch.arange(first, end, device=queries.device).unsqueeze(1)
        columns = torch.arange(low, high, device=queries.device)
        results.append(
            F.scaled_dot_product_attention(
                queries[:, :, first:end],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=(rows - columns).abs() <= max_distance,
            )
        )
    return torch.cat(results, dim=2)
