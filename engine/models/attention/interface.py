"""What a model asks of its attention, and what its heads are like."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from engine.models.attention.rows import AttentionRows


class Heads(NamedTuple):
    """The heads of a model, and what is done to their scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    """Of scores; None: one over the root of `head_dim`."""
    softcap: float | None = None
    """Bends scores s to cap * tanh(s / cap), for which torch has no fused operator."""


class Attention(Protocol):
    """Plans a step once and attends in every layer; plans are for the attention that made them."""

    def plan(self, rows: AttentionRows, window: int | None) -> Any:
        """Prepare the rows of a step; `window` limits how far back a token looks."""
        ...

    def attend(
        self, queries: Tensor, cache: Tensor, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from [tokens, heads, head_dim] to the cache; return [tokens, heads * head_dim].

        Sinks [heads] are scores that take their share and give nothing, where the model has some.
        """
        ...
