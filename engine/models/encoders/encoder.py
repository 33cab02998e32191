"""The encoder: embeddings and layers over one flat batch of whole sequences, without padding.

Sequences of equal length lie side by side, so that their attention is one call; nothing is kept
from one step to the next.
"""

from itertools import groupby

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.reference import rotate
from engine.models.attention.projections import Rotation
from engine.models.attention.rotary import rotation
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
    grouping: int = 0
    """Which of the ways to divide a batch says what belongs to a sequence."""


class EncoderLayers(msgspec.Struct, frozen=True):
    """The layers of an encoder, of text or of images."""

    layers: list[EncoderLayer]
    final_norm: Rows | None
    norm_first: bool
    """Whether norms stand before attention and MLP."""
    num_heads: int

    def states(
        self, x: Tensor, groupings: list[list[SequenceGroup]], rotations: list[Rotation]
    ) -> Tensor:
        """Return the last states of embedded tokens, both [tokens, hidden]."""
        for layer in self.layers:
            rotated = None if layer.rotary is None else rotations[layer.rotary]
            groups = groupings[layer.grouping]
            if self.norm_first:
                normed = x if layer.attention_norm is None else layer.attention_norm(x)
                x = self._attend(layer, normed, groups, rotated).add_(x)
                x = layer.mlp(layer.mlp_norm(x)).add_(x)
            else:
                assert layer.attention_norm is not None
                x = layer.attention_norm(self._attend(layer, x, groups, rotated).add_(x))
                x = layer.mlp_norm(layer.mlp(x).add_(x))
        return x if self.final_norm is None else self.final_norm(x)

    def _attend(
        self,
        layer: EncoderLayer,
        x: Tensor,
        groups: list[SequenceGroup],
        rotated: Rotation | None,
    ) -> Tensor:
        tokens, width = x.shape
        qkv = layer.qkv(x).view(tokens, 3, self.num_heads, width // self.num_heads)
        if rotated is not None:
            heads = qkv[:, :2].flatten(1, 2)
            qkv[:, :2] = rotate(heads, *rotated).view(tokens, 2, self.num_heads, -1)
        attended = x.new_empty(tokens, width)
        for group in groups:
            end = group.first + group.count * group.length
            parts = qkv[group.first : end].view(group.count, group.length, 3, self.num_heads, -1)
            queries, keys, values = parts.permute(2, 0, 3, 1, 4)
            result = _attention(queries, keys, values, layer.reach)
            target = attended[group.first : end].view(group.count, group.length, self.num_heads, -1)
            target.copy_(result.transpose(1, 2))
        return layer.output(attended)


class Encoder:
    """A model of text on one device; it has no state."""

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
        self._layers = EncoderLayers(layers, final_norm, norm_first, num_heads)
        self._rotary = rotary

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def states(self, batch: EncoderBatch) -> Tensor:
        """Return the last states of all tokens, [tokens, hidden]."""
        rotations = [rotation(table, batch.positions) for table in self._rotary]
        return self._layers.states(self._embed(batch), [batch.groups], rotations)

    def _embed(self, batch: EncoderBatch) -> Tensor:
        x = F.embedding(batch.token_ids, self._embedding)
        if self._types is not None:
            x += F.embedding(batch.types, self._types)
        if self._positions is not None:
            x += F.embedding(batch.positions, self._positions)
        return self._embedding_norm(x)


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
