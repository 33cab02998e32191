"""When the steps of a simulated executor are over: a clock for each pipeline stage."""

import time
from collections.abc import Iterable, Sequence


class StageTimes:
    """Every stage computes one step after the other, each for an equal part of the step's cost.

    A step enters the first stage when that is free and the tokens that it goes on from have been
    drawn, by the last stage. Times are in seconds: of the monotonic clock, or of one that stands
    still but while somebody waits for a step.
    """

    def __init__(self, num_stages: int, *, virtual: bool) -> None:
        self._virtual = virtual
        self._now = 0.0
        self._free_at = [0.0] * num_stages
        self.busy = [0.0] * num_stages
        """How long each stage has computed."""
        self._drawn_at: dict[int, float] = {}
        """By slot: when its newest token is drawn."""

    def now(self) -> float:
        """Return the time."""
        return self._now if self._virtual else time.monotonic()

    def run(self, cost: float, slots: Sequence[int], drawing: Iterable[int]) -> float:
        """Compute a step with rows of these slots, which draws for some; return when it is over."""
        at = max([self.now(), *(self._drawn_at.get(slot, 0.0) for slot in slots)])
        part = cost / len(self.busy)
        for stage, free_at in enumerate(self._free_at):
            at = max(at, free_at) + part
            self._free_at[stage] = at
            self.busy[stage] += part
        self._drawn_at.update(dict.fromkeys(drawing, at))
        return at

    def wait_until(self, over_at: float) -> None:
        """Wait for a step."""
        if self._virtual:
            self._now = max(self._now, over_at)
        elif (remaining := over_at - time.monotonic()) > 0:
            time.sleep(remaining)
