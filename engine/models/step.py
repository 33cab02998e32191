"""A decoder's input for a step: tokens and attention plans."""

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.models.adapters import AdapterBank, AdapterRows
from engine.models.attention.interface import Attention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.plan import AttentionPlan
from engine.models.attention.rotary import Rotation
from engine.models.attention.rows import AttentionRows


class FinalTokens(msgspec.Struct, frozen=True):
    """The tokens of a step whose states are needed after the last layer."""

    tokens: Tensor
    """[final] int64: indices into the tokens of the step."""
    plan: Any
    """Attention plan for the last layer, with each token as a separate row."""


class GroupTokens(msgspec.Struct, frozen=True):
    """The tokens of one step as seen by the layers of a cache group other than the first."""

    slots: Tensor
    plans: dict[int | None, Any]


class Taps:
    """Collects the states between some layers during a step."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """Collect states after each of these numbers of layers, in ascending order."""
        self._layers = frozenset(layers)
        self._states: list[Tensor] = []

    def record(self, num_layers: int, states: Tensor) -> None:
        """Record states [tokens, hidden] after `num_layers` layers if selected; copies them."""
        if num_layers in self._layers:
            self._states.append(states.clone())

    def states(self) -> Tensor:
        """Return the collected states of each token, concatenated: [tokens, layers * hidden]."""
        return torch.cat(self._states, dim=1)


NO_TAPS = Taps(())
"""Collects nothing."""


class WholeImages(msgspec.Struct, frozen=True):
    """Plans for image tokens that attend to their whole image, always with all its queries."""

    queries: Tensor
    """[queries] int64: indices into the step's tokens; arbitrary for tokens of earlier steps."""
    computed: Tensor
    """[tokens] int64: indices of the queries that are computed in this step."""
    rows: AttentionRows
    """Rows that the plans were made for: one per image."""
    plans: tuple[dict[int | None, AttentionPlan], ...]
    """Plans by sliding window, for each cache group."""


class ImageTokens(msgspec.Struct, frozen=True):
    """The tokens of a step that are placeholders for image embeddings."""

    tokens: Tensor
    """[tokens] int64: indices into the tokens of the step."""
    embeddings: Tensor
    """[tokens, hidden]"""
    whole: WholeImages | None = None
    """None for models whose image tokens attend like others."""


class StepTokens(msgspec.Struct, frozen=True):
    """The tokens of one step, with rows concatenated."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64, for rotary embeddings; [3, tokens] (time, row, column) for models with image
    positions."""
    slots: Tensor
    """[tokens] int64: flat cache slot (block * block_size + offset) that each token is written
    to."""
    rows: AttentionRows
    """Rows that the plans were made for."""
    plans: dict[int | None, Any]
    """Attention plans by the sliding windows of the layers."""
    final: FinalTokens | None = None
    """None if all states are needed."""
    adapters: AdapterRows | None = None
    """The adapter of each token; None if no token has one."""
    others: tuple[GroupTokens, ...] = ()
    """Slots and plans of the cache groups after the first, which have their own KV blocks."""
    taps: Taps = NO_TAPS
    """Collects states between layers; those after the last layer are of final tokens only."""
    images: ImageTokens | None = None
    """None if the step has no image tokens."""


class ForwardContext(NamedTuple):
    """Inputs shared by all layers during a step."""

    step: StepTokens
    rotations: list[Rotation]
    """Rotation factors of the step's positions, for each of the model's rotary tables."""
    temperatures: Tensor | None
    """[tokens, 1, 1]: query multipliers, if some layer uses them."""
    attention: Attention
    image_attention: PagedAttention | None
    """Attention for image tokens that attend to their whole image."""
    adapters: AdapterBank | None
