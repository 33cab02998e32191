"""The interface of attention implementations and the description of a model's heads."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from engine.models.attention.rows import AttentionRows


class Heads(NamedTuple):
    """Head counts and sizes, and how scores are modified."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    """Scale of scores; None means 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Caps scores s to cap * tanh(s / cap); torch has no fused operator for it."""


class Attention(Protocol):
    """Plans a step once and attends in every layer. Plans are specific to an implementation."""

    def plan(self, rows: AttentionRows, window: int | None) -> Any:
        """Plan the rows of a step; `window` limits how far back a token attends."""
        ...

    def attend(
        self, queries: Tensor, cache: Tensor, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from [tokens, heads, head_dim] to the cache; return [tokens, heads * head_dim].

        `sinks`, [heads], are extra scores that take part in the softmax but have no value.
        """
        ...
