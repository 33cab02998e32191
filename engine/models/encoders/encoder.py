"""The encoder: embeddings and layers over one flat batch of whole sequences, without padding.

Sequences of equal length lie side by side, so that their attention is one call; nothing is kept
from one step to the next.
"""

from itertools import groupby

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.attention.rotary import rotate, rotation
from engine.models.layers import Rows

_BLOCK = 256
"""Queries of a long sequence that attend together, where they see only their neighbours."""


class SequenceGroup(msgspec.Struct, frozen=True):
    """Sequences of one length, one after the other in a batch."""

    first: int
    """Token of the batch at which they begin."""
    count: int
    length: int


class EncoderBatch(msgspec.Struct, frozen=True):
    """Whole sequences, the shortest first."""

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
    """Return the groups of sequences of these lengths, which are in order."""
    groups: list[SequenceGroup] = []
    first = 0
    for length, members in groupby(lengths):
        count = len(list(members))
        groups.append(SequenceGroup(first, count, length))
        first += count * length
    return groups


class EncoderLayer(msgspec.Struct, frozen=True):
    """One layer; a norm stands before each block or after its result is added."""

    qkv: Rows
    """To queries, keys and values, side by side."""
    output: Rows
    mlp: Rows
    attention_norm: Rows | None
    mlp_norm: Rows
    rotary: int | None = None
    """Which of the rotary tables; None where positions are embedded."""
    reach: int | None = None
    """How far a token sees to each side; None for all."""


class Encoder:
    """A model on one device; it has no state."""

    def __init__(
        self,
        *,
        embedding: Tensor,
        positions: Tensor | None,
        types: Tensor | None,
        embedding_norm: Rows,
        layers: list[EncoderLayer],
        final_norm: Rows | None,
        norm_first: bool,
        rotary: list[Tensor],
        num_heads: int,
    ) -> None:
        """Take the weights.

        Args:
            embedding: [vocab, hidden]
            positions: [positions, hidden], that of a sequence's first token first.
            types: [types, hidden]
            rotary: tables as `engine.models.attention.rotary.rotary_table` makes them.
            norm_first: whether norms stand before attention and MLP.
        """
        self._embedding = embedding
        self._positions = positions
        self._types = types
        self._embedding_norm = embedding_norm
        self._layers = layers
        self._final_norm = final_norm
        self._norm_first = norm_first
        self._rotary = rotary
        self._heads = num_heads

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def states(self, batch: EncoderBatch) -> Tensor:
        """Return the last states of all tokens, [tokens, hidden]."""
        x = self._embed(batch)
        rotations = [rotation(table, batch.positions) for table in self._rotary]
        for layer in self._layers:
            rotated = None if layer.rotary is None else rotations[layer.rotary]
            if self._norm_first:
                normed = x if layer.attention_norm is None else layer.attention_norm(x)
                x = self._attend(layer, normed, batch.groups, rotated).add_(x)
                x = layer.mlp(layer.mlp_norm(x)).add_(x)
            else:
                assert layer.attention_norm is not None
                x = layer.attention_norm(self._attend(layer, x, batch.groups, rotated).add_(x))
                x = layer.mlp_norm(layer.mlp(x).add_(x))
        return x if self._final_norm is None else self._final_norm(x)

    def _embed(self, batch: EncoderBatch) -> Tensor:
        x = F.embedding(batch.token_ids, self._embedding)
        if self._types is not None:
            x += F.embedding(batch.types, self._types)
        if self._positions is not None:
            x += F.embedding(batch.positions, self._positions)
        return self._embedding_norm(x)

    def _attend(
        self,
        layer: EncoderLayer,
        x: Tensor,
        groups: list[SequenceGroup],
        rotated: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        tokens, width = x.shape
        qkv = layer.qkv(x).view(tokens, 3, self._heads, width // self._heads)
        if rotated is not None:
            heads = qkv[:, :2].flatten(1, 2)
            qkv[:, :2] = rotate(heads, *rotated).view(tokens, 2, self._heads, -1)
        attended = x.new_empty(tokens, width)
        for group in groups:
            end = group.first + group.count * group.length
            parts = qkv[group.first : end].view(group.count, group.length, 3, self._heads, -1)
            queries, keys, values = parts.permute(2, 0, 3, 1, 4)
            result = _attention(queries, keys, values, layer.reach)
            target = attended[group.first : end].view(group.count, group.length, self._heads, -1)
            target.copy_(result.transpose(1, 2))
        return layer.output(attended)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, reach: int | None) -> Tensor:
    """Attend within sequences [count, heads, length, head_dim], as far as `reach` to each side."""
    length = queries.shape[2]
    if reach is None or length <= reach + 1:
        return F.scaled_dot_product_attention(queries, keys, values)
    results = []
    for first in range(0, length, _BLOCK):
        end = min(first + _BLOCK, length)
        low, high = max(0, first - reach), min(length, end + reach)
        rows = torch.arange(first, end, device=queries.device).unsqueeze(1)
        columns = torch.arange(low, high, device=queries.device)
        results.append(
            F.scaled_dot_product_attention(
                queries[:, :, first:end],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=(rows - columns).abs() <= reach,
            )
        )
    return torch.cat(results, dim=2)
