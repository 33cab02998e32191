"""What a decoder is given of a step: its tokens, and how they attend."""

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
    """[final] int64: index among the tokens of the step."""
    plan: Any
    """How they attend in the last layer, each as a row of its own."""


class GroupTokens(msgspec.Struct, frozen=True):
    """The tokens of one step as the layers of another group than the first see them."""

    slots: Tensor
    plans: dict[int | None, Any]


class Taps:
    """Collects the states between some layers as a step is computed."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """Take states after so many layers each, in ascending order."""
        self._layers = frozenset(layers)
        self._states: list[Tensor] = []

    def see(self, num_layers: int, states: Tensor) -> None:
        """States [tokens, hidden] have gone through so many layers; they may be overwritten."""
        if num_layers in self._layers:
            self._states.append(states.clone())

    def states(self) -> Tensor:
        """Return what was taken of each token, side by side: [tokens, layers * hidden]."""
        return torch.cat(self._states, dim=1)


NO_TAPS = Taps(())
"""Collects nothing."""


class WholeImages(msgspec.Struct, frozen=True):
    """How tokens of images attend, each to all of its image: always as many as the image has."""

    queries: Tensor
    """[queries] int64: index among the tokens of the step; any where one was computed before."""
    computed: Tensor
    """[tokens] int64: those of the queries that are computed in the step."""
    rows: AttentionRows
    """What the plans were made for: a row for each image."""
    plans: tuple[dict[int | None, AttentionPlan], ...]
    """For each group of layers by their windows."""


class ImageTokens(msgspec.Struct, frozen=True):
    """The tokens of a step that stand for images."""

    tokens: Tensor
    """[tokens] int64: index among the tokens of the step."""
    embeddings: Tensor
    """[tokens, hidden]"""
    whole: WholeImages | None = None
    """None for a model where they attend as others do."""


class StepTokens(msgspec.Struct, frozen=True):
    """The tokens of one step, rows one after the other."""

    token_ids: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64, which queries and keys are turned by; [3, tokens] where a token that stands
    for a part of an image has a time, a row and a column."""
    slots: Tensor
    """[tokens] int64: flat cache slot (block * block_size + offset) that each token fills."""
    rows: AttentionRows
    """What the plans were made for."""
    plans: dict[int | None, Any]
    """How to attend, per sliding window that some layer has; made by the model's attention."""
    final: FinalTokens | None = None
    """None if all states are needed."""
    adapters: AdapterRows | None = None
    """Which adapter each token is computed with; None if none has one."""
    others: tuple[GroupTokens, ...] = ()
    """What differs for all groups of layers but the first, which have KV blocks of their own."""
    taps: Taps = NO_TAPS
    """What states between layers are given to; those after the last layer are of final tokens."""
    images: ImageTokens | None = None
    """None if there are none in the step."""


class ForwardContext(NamedTuple):
    """What all layers read while a step is computed."""

    step: StepTokens
    rotations: list[Rotation]
    """By the positions of the step's tokens, one for each of the model's rotary tables."""
    temperatures: Tensor | None
    """[tokens, 1, 1]: of queries, where some layer is tempered."""
    attention: Attention
    image_attention: PagedAttention | None
    """How tokens of images attend where they see all of their image."""
    adapters: AdapterBank | None
