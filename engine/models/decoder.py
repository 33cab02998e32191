"""The decoder: embeddings, layers of attention and MLP over a paged KV cache, and the LM head."""

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.models.adapters import AdapterBank, AdapterRows, AdapterWeights
from engine.models.attention.interface import Attention
from engine.models.attention.paged import PagedAttention
from engine.models.attention.projections import SelfAttention
from engine.models.attention.rotary import Rotary
from engine.models.module import Module, Rows, add_to
from engine.models.moe import SparseMlp
from engine.models.parallel.experts import DistributedExperts, ExpertGroup
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec
from engine.models.step import FinalTokens, ForwardContext, StepTokens


class DecoderLayer(Module):
    """Attention and an MLP with residual connections."""

    def __init__(
        self,
        *,
        attention_norm: Rows | None,
        self_attn: SelfAttention,
        mlp_norm: Rows | None,
        mlp: Rows,
        attention_output_norm: Rows | None = None,
        mlp_output_norm: Rows | None = None,
        is_parallel: bool = False,
        residual_scale: float = 1.0,
        shards: Group | None = None,
    ) -> None:
        """Initialize from the modules; output norms are applied before the residual addition.

        Args:
            is_parallel: whether the MLP has the same input as attention.
            residual_scale: scale of the outputs that are added.
            shards: processes whose partial outputs are summed before being added.
        """
        super().__init__()
        self.attention_norm = attention_norm
        self.self_attn = self_attn
        self.attention_output_norm = attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_output_norm = mlp_output_norm
        self.is_parallel = is_parallel
        self.residual_scale = residual_scale
        self._shards = shards
        self._adds_in_place = (
            shards is None
            and attention_output_norm is None
            and mlp_output_norm is None
            and residual_scale == 1.0
        )

    @property
    def sparse(self) -> SparseMlp | None:
        """The mixture-of-experts part of the MLP, if it has one."""
        return next((each for each in self.modules() if isinstance(each, SparseMlp)), None)

    def forward(
        self, x: Tensor, cache: Tensor, context: ForwardContext, final: FinalTokens | None
    ) -> Tensor:
        """Return states [tokens, hidden], updated in place; only final tokens' if given."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        if final is not None:
            x = x.index_select(0, final.tokens)
        x = self._added(
            x, self.attention_output_norm, self.self_attn, normed, cache, context, final
        )
        if not x.shape[0]:
            return x
        if not self.is_parallel:
            normed = x if self.mlp_norm is None else self.mlp_norm(x)
        elif final is not None:
            normed = normed.index_select(0, final.tokens)
        return self._added(x, self.mlp_output_norm, self.mlp, normed)

    def _added(self, x: Tensor, norm: Rows | None, block: Any, *arguments: Any) -> Tensor:
        if self._adds_in_place:
            return add_to(x, block, *arguments)
        output: Tensor = block(*arguments)
        if not output.shape[0]:
            return x
        if self._shards is not None:
            output = self._shards.all_reduce(output)
        if norm is not None:
            output = norm(output)
        if self.residual_scale != 1.0:
            output = output.mul_(self.residual_scale)
        return x.add_(output)


class Followers(Protocol):
    """The other processes of a split model, which repeat each operation on their shards."""

    def forward(self, step: StepTokens) -> None:
        """Run all layers on these tokens."""
        ...

    def dummy_step(self) -> None:
        """Run their experts for the other engines of the expert group."""
        ...

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> None:
        """Compute logits of these states [rows, hidden]."""
        ...

    def embed(self, token_ids: Tensor) -> None:
        """Look up the embeddings of token ids [tokens]."""
        ...

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Load their part of an adapter into a slot."""
        ...


class Decoder(Module, finds_hooks=True):
    """A model replica on one device; all state is in the KV cache passed to it."""

    temperatures: Tensor | None

    def __init__(
        self,
        spec: ModelSpec,
        layers: Iterable[DecoderLayer],
        attention: Attention,
        types: ComputeTypes,
        device: torch.device,
        *,
        rotary: Iterable[Rotary],
        temperatures: Tensor | None = None,
        embed_tokens: Rows | None = None,
        norm: Rows | None = None,
        lm_head: Rows | None = None,
        expert_group: ExpertGroup | None = None,
        followers: Followers | None = None,
        adapters: AdapterBank | None = None,
        image_attention: PagedAttention | None = None,
    ) -> None:
        """Initialize from the modules; with an expert group, only this engine's experts.

        Args:
            rotary: one for each of the model's rotary tables.
            temperatures: [max_model_len], see `attention.rotary.temperatures`.
            embed_tokens: maps token ids [tokens] to [tokens, hidden]; None except in the first
                stage.
            norm: of the final states; like the LM head None except in the last stage.
            followers: processes with the other parts of a distributed model.
            adapters: adapters used by the products, if the model is served with any.
            image_attention: attention for image tokens that attend to their whole image.
        """
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.rotary = nn.ModuleList(rotary)
        self.register_buffer("temperatures", temperatures, persistent=False)
        self.dtype = types.activations
        self.kv_format = types.kv_format
        """Format of the KV cache."""
        self.device = device
        """Device of the weights."""
        self.adapters = adapters
        self._followers = followers
        self.spec = spec
        self.attention = attention
        self.image_attention = image_attention
        self.expert_group = expert_group
        groups = spec.cache_groups
        self.windows: list[set[int | None]] = [set() for _ in groups.windows]
        """For each cache group, the sliding windows for which `StepTokens.plans` needs plans."""
        for layer, window in enumerate(spec.windows):
            self.windows[groups.group_of(layer)].add(window)

    @property
    def is_single_process(self) -> bool:
        """Whether a step involves no other process."""
        return self._followers is None and self.expert_group is None

    @property
    def is_whole(self) -> bool:
        """Whether all layers are local (possibly sharded), from the embedding to the LM head."""
        return self.embed_tokens is not None and self.lm_head is not None

    @property
    def is_recordable(self) -> bool:
        """Whether a decode step can be captured as a CUDA graph: always the same kernels.

        Expert calls depend on how many tokens are routed to each, and distributed models
        communicate in between.
        """
        return self.is_single_process and self.is_whole and not self.sparse_layers

    @property
    def sparse_layers(self) -> dict[int, SparseMlp]:
        """The layers with experts, by number."""
        layers = cast("Iterable[DecoderLayer]", self.layers)
        found = enumerate(layer.sparse for layer in layers)
        return {index: sparse for index, sparse in found if sparse is not None}

    def forward(
        self, step: StepTokens, cache: list[Tensor], incoming: Tensor | None = None
    ) -> Tensor:
        """Run all layers, filling the cache, and return normalized states [tokens, hidden].

        A pipeline stage other than the first takes the previous stage's states [tokens, hidden] as
        `incoming` and may overwrite them; one other than the last returns unnormalized states. If
        the step specifies final tokens, only their states are returned, and the last layer computes
        only keys and values for the others.

        Raises:
            GroupBroken: an engine that holds some of the experts has failed.
        """
        if self._followers is not None:
            self._followers.forward(step)
        if self.expert_group is not None:
            self._begin_together(self.expert_group, len(step.token_ids))
        if self.adapters is not None:
            self.adapters.current = step.adapters
        if self.embed_tokens is None:
            assert incoming is not None, "a later stage needs the states of the previous one"
            x = incoming
        else:
            x = self.embed_tokens(step.token_ids)
            if step.images is not None:
                x.index_copy_(0, step.images.tokens, step.images.embeddings)
        scales = self.temperatures
        context = ForwardContext(
            step,
            [rotary(step.positions) for rotary in self.rotary],
            None if scales is None else scales.index_select(0, step.positions).view(-1, 1, 1),
            self.attention,
            self.image_attention,
            self.adapters,
        )
        last = len(self.layers) - 1
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            step.taps.record(index, x)
            x = layer(x, layer_cache, context, step.final if index == last else None)
        step.taps.record(last + 1, x)
        if self.expert_group is not None:
            self.expert_group.end_step()
        return x if self.norm is None else self.norm(x)

    def _begin_together(self, group: ExpertGroup, num_tokens: int) -> bool:
        """Begin a step with all ranks; return whether any has tokens.

        Experts of at most one layer are rebalanced per step, so that no rank waits long for the
        others.
        """
        has_tokens = group.begin_step(num_tokens)
        layer = group.next_change()
        if layer is not None:
            experts = self.sparse_layers[layer].experts
            assert isinstance(experts, DistributedExperts)
            experts.change()
        return has_tokens

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] for token ids [tokens], without adapters; runs in all processes.

        Requires the first stage.
        """
        assert self.embed_tokens is not None, "only the first stage can embed"
        if self._followers is not None:
            self._followers.embed(token_ids)
        if self.adapters is not None:
            self.adapters.current = None
        return self.embed_tokens(token_ids)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Load an adapter into a slot, in all processes; the model must have adapter slots."""
        assert self.adapters is not None, "the model was loaded without adapters"
        if self._followers is not None:
            self._followers.load_adapter(slot, weights)
        self.adapters.write(slot, weights)

    def dummy_step(self) -> None:
        """Run the local experts for the other engines of the expert group, if there is one.

        Raises:
            GroupBroken: one of them has failed.
        """
        if self.expert_group is None:
            return
        if self._followers is not None:
            self._followers.dummy_step()
        if self._begin_together(self.expert_group, 0):
            empty = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
            for mlp in self.sparse_layers.values():
                mlp(empty)
        self.expert_group.end_step()

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Return [rows, vocab] for normalized states [rows, hidden], with the rows' adapters."""
        if self._followers is not None:
            self._followers.logits(hidden, adapters)
        if self.adapters is not None:
            self.adapters.current = adapters
        return self.classify(hidden)

    def classify(self, hidden: Tensor) -> Tensor:
        """Return [rows, labels] for normalized states [rows, hidden] in float32."""
        assert self.lm_head is not None, "only the last stage has the LM head"
        return self.lm_head(hidden)
