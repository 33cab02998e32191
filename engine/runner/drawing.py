"""How tokens are drawn from logits: which functions do it, for a model on a device."""

from dataclasses import dataclass

from engine.runner.categorical import DrawFromLogits, draw_from_logits
from engine.runner.filters import DrawFiltered, draw_filtered


@dataclass(frozen=True)
class Drawing:
    """Draws a token of each row; all functions treat rows independently."""

    unfiltered: DrawFromLogits
    filtered: DrawFiltered


WITH_TORCH = Drawing(draw_from_logits, draw_filtered)
"""With torch's operators, on any device."""
