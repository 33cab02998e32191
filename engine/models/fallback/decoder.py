"""A transformers model behind the decoder interface."""

import inspect
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from engine.models.attention.interface import Attention
from engine.models.cache_groups import CacheGroups
from engine.models.decoder import Decoder
from engine.models.fallback.attention import AttentionCalls
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec
from engine.models.step import StepTokens


class TransformersModel:
    """A causal model split into two parts: tokens to states, and states to logits.

    Post-processing after the LM head (scales, caps) exists only in the class's `forward`. So
    `forward` is called for logits, with the state part replaced to return given states.
    """

    def __init__(self, model: Any) -> None:
        """Wrap a transformers model; replaces the `forward` of its core."""
        self.whole = model
        """The complete transformers model."""
        self.core: Any = _core(model)
        """The submodule that maps tokens to states."""
        self._states_of = self.core.forward
        self._given_states: Tensor | None = None
        self._output_type: type | None = None
        self.core.forward = self._forward

    @property
    def takes_positions(self) -> bool:
        """Whether the model accepts position ids."""
        return "position_ids" in inspect.signature(self._states_of).parameters

    def states(self, token_ids: Tensor, positions: Tensor | None) -> Tensor:
        """Return states [tokens, hidden] of tokens; without positions, of a whole sequence."""
        options = {} if positions is None else {"position_ids": positions.unsqueeze(0)}
        out = self.core(
            input_ids=token_ids.unsqueeze(0), use_cache=False, return_dict=True, **options
        )
        self._output_type = type(out)
        states: Tensor = out[0]
        return states[0]

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [rows, vocab] of states [rows, hidden]; call `states` before."""
        assert self._output_type is not None, "`states` must be called first"
        self._given_states = states.unsqueeze(0)
        try:
            tokens = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
            logits: Tensor = self.whole(input_ids=tokens, use_cache=False, return_dict=True).logits
        finally:
            self._given_states = None
        return logits[0]

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        if self._given_states is None:
            return self._states_of(*arguments, **options)
        assert self._output_type is not None
        return self._output_type(last_hidden_state=self._given_states)


def _core(model: Any) -> nn.Module:
    """Return the submodule that a causal model calls for its states."""
    called: list[nn.Module] = []

    class Found(Exception):
        """The first candidate module was called."""

    def note(module: nn.Module, *_: Any) -> None:
        called.append(module)
        raise Found

    candidates = {id(each): each for each in (model.get_decoder(), model.base_model)}
    candidates.pop(id(model), None)
    hooks = [each.register_forward_pre_hook(note) for each in candidates.values()]
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=tokens, use_cache=False)
    except Found:
        return called[0]
    finally:
        for hook in hooks:
            hook.remove()
    raise ValueError("no submodule computes its hidden states")


class FallbackDecoder(Decoder):
    """Runs a transformers model over an engine's KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        model: TransformersModel,
        calls: AttentionCalls,
        attention: Attention,
        types: ComputeTypes,
        device: torch.device,
    ) -> None:
        """Initialize from a model whose attention layers call `calls`."""
        vocabulary = spec.vocab_size
        super().__init__(
            spec,
            [],
            attention,
            types,
            device,
            rotary=[],
            embed_tokens=lambda token_ids: model.core.get_input_embeddings()(token_ids),
            lm_head=lambda states: model.logits(states)[:, :vocabulary],
        )
        self.model = model.whole
        self._model = model
        groups = spec.cache_groups
        self._group_of = [groups.group_of(layer) for layer in range(spec.num_layers)]
        self._calls = calls
        self._types = types

    def grouped(self, groups: CacheGroups) -> "FallbackDecoder":
        """Return the same model with its layers in cache groups."""
        spec = msgspec.structs.replace(self.spec, cache_groups=groups)
        parts = self._model, self._calls, self.attention, self._types, self.device
        return FallbackDecoder(spec, *parts)

    @property
    def is_recordable(self) -> bool:
        """Always false: some transformers modules synchronize with the device."""
        return False

    def forward(
        self, step: StepTokens, cache: list[Tensor], incoming: Tensor | None = None
    ) -> Tensor:
        """Run all layers, filling the cache; return states as `Decoder.forward` does."""
        assert incoming is None, "all layers are in this process"
        self._calls.begin(step, cache, self._group_of)
        states = self._model.states(step.token_ids, step.positions)
        self._calls.end()
        return states if step.final is None else states.index_select(0, step.final.tokens)
