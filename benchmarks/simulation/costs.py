"""How long a step takes: a formula, in place of a model."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.scheduler.batch import BatchPlan


class StepCost(NamedTuple):
    """One rank's share of a step."""

    ns: int
    prefill_tokens: int


@dataclass(frozen=True)
class CostModel:
    """Duration of a step in ns: a constant plus a cost for each kind of work in it."""

    step_ns: int
    decode_ns: int
    """Per sequence that gets one token."""
    kv_token_ns: int
    """Per token that these sequences attend to."""
    prefill_token_ns: int
    mixed_ns: int = 0
    """Once, if there is any prefill."""

    def of(self, plan: BatchPlan) -> StepCost:
        """Return what a plan costs; an empty one, a dummy batch, costs the constant."""
        # Rows of one token come first in every plan.
        decodes = plan.counts.count(1)
        context = sum(plan.starts[:decodes]) + decodes
        prefill_tokens = sum(plan.counts) - decodes
        ns = self.step_ns + self.decode_ns * decodes + self.kv_token_ns * context
        if prefill_tokens:
            ns += self.prefill_token_ns * prefill_tokens + self.mixed_ns
        return StepCost(ns, prefill_tokens)
