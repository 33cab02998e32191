"""Attention of a transformers model: recorded in a trial, then computed over the KV cache.

transformers calls one function for every attention layer. In a trial, that function records its
arguments; in a step it writes keys and values to the paged cache and attends over it. transformers
also calls a function for every mask. Ours returns only the window, which some classes encode in
masks alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.attention.interface import Attention
from engine.models.attention.kv_format import KvFormat
from engine.models.step import GroupTokens, StepTokens

INTERFACE = "swell"
"""Name under which the functions are registered with transformers."""
_CALLS = "swell_calls"
"""Attribute of every module of a model: its `AttentionCalls`."""
_WINDOW_DTYPE = torch.int32
"""Dtype of the placeholder masks; masks that a class creates itself have another dtype."""
_MASKING = ("position_bias", "head_mask", "score_mod", "block_mask", "indices")
"""Arguments that change which keys are attended to."""


class CannotAttend(ValueError):
    """The model attends in a way that the KV cache does not support."""


class LayerCall(msgspec.Struct, frozen=True):
    """Parameters of one attention layer."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def width(self) -> int:
        """Head size that fits both keys and values."""
        return max(self.key_size, self.value_size)


class _Step(NamedTuple):
    tokens: list[StepTokens | GroupTokens]
    """Tokens of each layer's cache group."""
    cache: list[Tensor]


class AttentionCalls:
    """Handles the calls of one model's attention layers, which always come in the same order."""

    def __init__(self, model: nn.Module) -> None:
        """Attach to all modules of the model."""
        self.layers: list[LayerCall] = []
        """In call order; set by a trial."""
        self._step: _Step | None = None
        self._noted: list[LayerCall] = []
        self._next = 0
        self._attention: Attention | None = None
        self._kv: KvFormat | None = None
        self._width = 0
        self._scale = 1.0
        for module in model.modules():
            setattr(module, _CALLS, self)

    def begin_trial(self) -> None:
        """Start recording calls; attention returns zeros."""
        self._step, self._noted = None, []

    def end_trial(self) -> None:
        """Use the recorded calls as the model's layers.

        Raises:
            CannotAttend: there was no call, or a layer was called more than once.
        """
        modules = [call.module for call in self._noted]
        if not modules:
            raise CannotAttend("it does not call the attention interface of transformers")
        if len({id(module) for module in modules}) < len(modules):
            raise CannotAttend("a layer attends more than once per token")
        self.layers = self._noted

    def serve(self, attention: Attention, kv_format: KvFormat, *, width: int, scale: float) -> None:
        """Use this attention from now on, with this head width and score scale."""
        self._attention, self._kv, self._width, self._scale = attention, kv_format, width, scale

    def begin(self, tokens: StepTokens, cache: list[Tensor], groups: Sequence[int]) -> None:
        """Begin a step; `cache` has a tensor per layer, `groups` the cache group of each."""
        parts: tuple[StepTokens | GroupTokens, ...] = (tokens, *tokens.others)
        self._step, self._next = _Step([parts[group] for group in groups], cache), 0

    def end(self) -> None:
        """End a step.

        Raises:
            CannotAttend: some layers were not called.
        """
        self._step = None
        if self._next != len(self.layers):
            raise CannotAttend(f"{self._next} of {len(self.layers)} layers attended")

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attend from queries [1, heads, tokens, size]; return [1, tokens, heads, size].

        Raises:
            CannotAttend: keys are not those of the tokens, or layers are called out of order.
        """
        if self._step is None:
            if mask is not None:
                options["sliding_window"] = int(mask[0, 0, 0, 0])
            noted = _layer_call(module, query, key, value, options)
            self._noted.append(noted)
            return query.new_zeros(1, query.shape[2], noted.heads, noted.value_size)
        number, step = self._next, self._step
        call = self.layers[number] if number < len(self.layers) else None
        if call is None or call.module is not module:
            raise CannotAttend("its layers attend out of order")
        self._next += 1
        cache, tokens, attention = step.cache[number], step.tokens[number], self._attention
        kv = self._kv
        assert attention is not None, "how to attend is known after the trial"
        assert kv is not None
        entries = [self._heads(each).to(kv.dtype) for each in (key, value)]
        kv.write(cache, tokens.slots, torch.stack(entries, dim=1))
        queries = self._heads(query)
        if call.scale != self._scale:
            queries = queries * (call.scale / self._scale)
        sinks = options.get("s_aux")
        out = attention.attend(
            queries.to(kv.dtype).contiguous(),
            cache,
            tokens.plans[call.window],
            None if sinks is None else sinks.float(),
        )
        out = out.view(1, -1, call.heads, self._width)[..., : call.value_size]
        return out.to(query.dtype).contiguous()

    def _heads(self, states: Tensor) -> Tensor:
        """Convert [1, heads, tokens, size] to [tokens, heads, width], padding heads."""
        heads = states.squeeze(0).transpose(0, 1)
        missing = self._width - heads.shape[2]
        return F.pad(heads, (0, missing)) if missing else heads


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers; dispatches to the module's `AttentionCalls`.

    Raises:
        CannotAttend: the model creates its own masks.
    """
    if attention_mask is not None and attention_mask.dtype != _WINDOW_DTYPE:
        raise CannotAttend("it creates its own attention masks")
    calls: AttentionCalls = getattr(module, _CALLS)
    return calls.attend(module, query, key, value, attention_mask, **options), None


def window_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Return a placeholder mask for `attend`, filled with the window, or 0 without one."""
    window = torch.full((1, 1, 1, 1), local_size or 0, dtype=_WINDOW_DTYPE, device=device)
    return window.expand(batch_size, 1, q_length, kv_length)


def register() -> None:
    """Register `attend` and `window_mask` with transformers as `INTERFACE`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INTERFACE, attend)
    AttentionMaskInterface.register(INTERFACE, window_mask)


def _layer_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> LayerCall:
    if len(query) != 1 or query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3]:
        raise CannotAttend("its keys and values are not those of the tokens")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise CannotAttend("its attention is not causal")
    masking = [name for name in _MASKING if options.get(name) is not None]
    if masking:
        raise CannotAttend(f"its attention takes {', '.join(masking)}")
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        raise CannotAttend("its query heads do not match its key heads")
    scale = options.get("scaling")
    return LayerCall(
        module=module,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_size=key.shape[3],
        value_size=value.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        window=options.get("sliding_window") or None,
        softcap=options.get("softcap") or None,
        has_sinks=options.get("s_aux") is not None,
    )
