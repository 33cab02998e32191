"""What a model asks of its attention."""

from typing import Any, Protocol

from torch import Tensor

from engine.models.attention.rows import AttentionRows


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
