"""The decoder: embeddings, layers of attention and MLP over a paged KV cache, and the LM head."""

from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from engine.models.adapters import AdapterBank, AdapterRows, AdapterWeights
from engine.models.attention.interface import Attention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.plan import AttentionPlan
from engine.models.attention.projections import Projections, Rotation
from engine.models.attention.rotary import rotation
from engine.models.attention.rows import AttentionRows
from engine.models.layers import Rows
from engine.models.moe import SparseMlp
from engine.models.parallel.experts import ExpertGroup, SpreadExperts
from engine.models.products.dense import add_to
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec


class PositionFactors(NamedTuple):
    """What the positions of a step's tokens multiply queries and keys by."""

    rotations: list[Rotation]
    """One for each of the model's rotary tables."""
    temperatures: Tensor | None
    """[tokens, 1, 1]: of queries, where some layer is tempered."""


class LayerWeights(msgspec.Struct, frozen=True):
    """One decoder layer; its blocks include all that is done to results before these are added."""

    attention_norm: Rows | None
    attention: Projections
    mlp_norm: Rows | None
    mlp: Rows
    window: int | None
    rope: int | None
    """Index of the model's rotary table; None for a layer without positions."""
    is_parallel: bool = False
    """Whether the MLP has the same input as attention."""
    sparse: SparseMlp | None = None
    """The part of `mlp` with the experts, if it has any."""
    is_tempered: bool = False
    """Whether queries are multiplied by the temperatures of their positions."""

    def write_and_query(
        self, x: Tensor, cache: Tensor, slots: Tensor, factors: PositionFactors
    ) -> Tensor:
        """Store what the cache keeps of normalized states; return queries of known positions."""
        rotated = None if self.rope is None else factors.rotations[self.rope]
        queries = self.attention.write_and_query(x, cache, slots, rotated)
        if not self.is_tempered or factors.temperatures is None:
            return queries
        return (queries * factors.temperatures).to(queries.dtype)


class DecoderWeights(msgspec.Struct, frozen=True):
    """All weights of a model, or those of a pipeline stage."""

    embed: Rows | None
    """From token ids [tokens] to [tokens, hidden]; None but at the first stage."""
    layers: list[LayerWeights]
    norm: Rows | None
    """None but at the last stage, as the next."""
    lm_head: Rows | None
    rotary: list[Tensor]
    """Each [max_model_len, 2, rotary_size / 2]: see `attention.rotary.rotary_table`."""
    temperatures: Tensor | None = None
    """[max_model_len]: see `attention.rotary.temperatures`."""
    sections: tuple[int, ...] = ()
    """Of all tables: see `RopeSpec`."""

    def factors(self, positions: Tensor) -> PositionFactors:
        """Return the factors of tokens at these positions."""
        heat = self.temperatures
        return PositionFactors(
            [rotation(table, positions, self.sections) for table in self.rotary],
            None if heat is None else heat.index_select(0, positions).view(-1, 1, 1),
        )


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


class Followers(Protocol):
    """Processes that compute the same with other parts of the weights; they are told each part."""

    def forward(self, step: StepTokens) -> None:
        """Have them run all layers on these tokens."""
        ...

    def dummy_step(self) -> None:
        """Have them run the experts that they hold for other engines."""
        ...

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> None:
        """Have them compute logits of these states [rows, hidden]."""
        ...

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Have them put their part of an adapter into a slot."""
        ...


class Decoder:
    """A model replica on one device; all state lives in the KV cache that it is given."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: Attention,
        types: ComputeTypes,
        device: torch.device,
        expert_group: ExpertGroup | None = None,
        followers: Followers | None = None,
        adapters: AdapterBank | None = None,
        image_attention: PagedAttention | None = None,
    ) -> None:
        """Take the weights, with an expert group only those experts that this engine has.

        Tokens of images attend by `image_attention` where they see all of their image. Followers
        hold the other parts of a model that is cut over several processes.
        """
        self.dtype = types.activations
        self.kv_format = types.kv_format
        """Of the KV cache."""
        self.device = device
        """Where the weights are."""
        self.adapters = adapters
        """What the products look adapters up in, where the model is served with some."""
        self._followers = followers
        self.spec = spec
        self.attention = attention
        self.image_attention = image_attention
        self.expert_group = expert_group
        self._weights = weights
        groups = spec.cache_groups
        self._group_of = [groups.group_of(layer) for layer in range(spec.num_layers)]
        self._windows: list[set[int | None]] = [set() for _ in groups.windows]
        for group, window in zip(self._group_of, spec.windows, strict=True):
            self._windows[group].add(window)

    @property
    def windows(self) -> list[set[int | None]]:
        """For each group of layers the sliding windows that `StepTokens.plans` needs plans for."""
        return self._windows

    @property
    def is_alone(self) -> bool:
        """Whether a step needs no other process."""
        return self._followers is None and self.expert_group is None

    @property
    def is_whole(self) -> bool:
        """Whether all layers, or parts of all, are here, from the embedding to the LM head."""
        return self._weights.embed is not None and self._weights.lm_head is not None

    @property
    def is_recordable(self) -> bool:
        """Whether a decode step is the same sequence of kernels each time it is run.

        Experts are called by how many tokens chose them, and parts of a model that is cut over
        processes meet in between.
        """
        return self.is_alone and self.is_whole and not self.sparse_layers

    @property
    def sparse_layers(self) -> dict[int, SparseMlp]:
        """The layers with experts, by number."""
        layers = enumerate(self._weights.layers)
        return {i: layer.sparse for i, layer in layers if layer.sparse is not None}

    @property
    def last_group(self) -> int:
        """The group of the last layer."""
        return self._group_of[-1]

    @property
    def last_window(self) -> int | None:
        """The sliding window of the last layer."""
        return self.spec.windows[-1]

    def hidden_states(
        self, step: StepTokens, cache: list[Tensor], incoming: Tensor | None = None
    ) -> Tensor:
        """Run all layers, filling the cache, and return normalized states [tokens, hidden].

        A pipeline stage but the first begins with the incoming states [tokens, hidden] of the stage
        before, which it may overwrite; one but the last returns states as they are. If the step
        names final tokens the states are theirs only: what comes after the keys and values of the
        last layer is not computed of the others.

        Raises:
            GroupBroken: an engine that holds some of the experts has failed.
        """
        if self._followers is not None:
            self._followers.forward(step)
        if self.expert_group is not None:
            self._begin_together(self.expert_group, len(step.token_ids))
        if self.adapters is not None:
            self.adapters.current = step.adapters
        x = self._first_states(step, incoming)
        factors = self._weights.factors(step.positions)
        last = self._weights.layers[-1]
        parts: tuple[StepTokens | GroupTokens, ...] = (step, *step.others)
        for index, (layer, layer_cache, group) in enumerate(
            zip(self._weights.layers, cache, self._group_of, strict=True)
        ):
            step.taps.see(index, x)
            part = parts[group]
            final = step.final if layer is last else None
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            queries = layer.write_and_query(normed, layer_cache, part.slots, factors)
            plan = part.plans[layer.window]
            if final is not None:
                x, queries = (each.index_select(0, final.tokens) for each in (x, queries))
                if layer.is_parallel:
                    normed = normed.index_select(0, final.tokens)
                plan = final.plan
                if step.adapters is not None and self.adapters is not None:
                    self.adapters.current = step.adapters.select(final.tokens)
            if len(x):
                sinks = layer.attention.sinks
                attended = self.attention.attend(queries, layer_cache, plan, sinks)
                if step.images is not None and final is None:
                    images, window = step.images, layer.window
                    self._attend_within(attended, queries, layer_cache, images, group, window)
                x = add_to(x, layer.attention.output, attended.to(x.dtype))
                if not layer.is_parallel:
                    normed = x if layer.mlp_norm is None else layer.mlp_norm(x)
                x = add_to(x, layer.mlp, normed)
        step.taps.see(len(self._weights.layers), x)
        if self.expert_group is not None:
            self.expert_group.end_step()
        return x if self._weights.norm is None else self._weights.norm(x)

    def _attend_within(
        self,
        attended: Tensor,
        queries: Tensor,
        cache: Tensor,
        images: ImageTokens,
        group: int,
        window: int | None,
    ) -> None:
        """Replace what tokens of images have attended to by what they see of all of them."""
        if images.whole is None:
            return
        assert self.image_attention is not None, "the model's images have plans of their own"
        own = queries.index_select(0, images.whole.queries)
        plan = images.whole.plans[group][window]
        within = self.image_attention.attend(own, cache, plan)
        within = within.index_select(0, images.whole.computed)
        attended.index_copy_(0, images.tokens, within.to(attended.dtype))

    def _first_states(self, step: StepTokens, incoming: Tensor | None) -> Tensor:
        """Return what the first layer here gets: embeddings, or states of the stage before."""
        if self._weights.embed is None:
            assert incoming is not None, "states come from the stage before"
            return incoming
        x = self._weights.embed(step.token_ids)
        if step.images is not None:
            x.index_copy_(0, step.images.tokens, step.images.embeddings)
        return x

    def _begin_together(self, group: ExpertGroup, num_tokens: int) -> bool:
        """Begin a step with all ranks; return whether any has tokens.

        Experts of one layer may move now, to share out the work evenly: of one only, so that no
        rank keeps the others waiting for long.
        """
        has_tokens = group.begin_step(num_tokens)
        layer = group.next_change()
        if layer is not None:
            experts = self.sparse_layers[layer].experts
            assert isinstance(experts, SpreadExperts)
            experts.change()
        return has_tokens

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] for token ids [tokens]; the first layer has to be here."""
        assert self._weights.embed is not None, "the first stage has it"
        return self._weights.embed(token_ids)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in all processes; the model has to have room for it."""
        assert self.adapters is not None, "the model was loaded without adapters"
        if self._followers is not None:
            self._followers.load_adapter(slot, weights)
        self.adapters.write(slot, weights)

    def dummy_step(self) -> None:
        """Run the experts that are here for the other engines of the group, if there is one.

        Raises:
            GroupBroken: one of them has failed.
        """
        if self.expert_group is None:
            return
        if self._followers is not None:
            self._followers.dummy_step()
        if self._begin_together(self.expert_group, 0):
            nothing = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
            for mlp in self.sparse_layers.values():
                mlp(nothing)
        self.expert_group.end_step()

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return [rows, vocab] for normalized states [rows, hidden], with the rows' adapters."""
        if self._followers is not None:
            self._followers.logits(hidden, adapters)
        if self.adapters is not None:
            self.adapters.current = adapters
        return self._head(hidden)

    def classify(self, hidden: Tensor) -> Tensor:
        """Return [rows, labels] for normalized states [rows, hidden] in float32."""
        return self._head(hidden)

    @property
    def _head(self) -> Rows:
        assert self._weights.lm_head is not None, "the last stage has it"
        return self._weights.lm_head
