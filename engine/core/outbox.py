"""Outputs and answers for front ends that have not been handed over yet."""

from typing import NamedTuple

from engine.scheduler.outputs import Outputs
from engine.shared.messages import EngineStats, RequestOutput, UtilityResult


class CoreStep(NamedTuple):
    """What goes out after a step: its outputs, and answers to messages handled before it."""

    outputs: Outputs
    """By front end; empty where only the stats are news."""
    utility_results: list[tuple[int, UtilityResult]]
    """With the front end that asked."""
    stats: EngineStats
    changes_alone: bool = False
    """The next step changes which request runs alone: all have to be told before it."""


class Outbox:
    """Outputs by front end, and answers to operators' calls."""

    def __init__(self) -> None:
        self.results: list[tuple[int, UtilityResult]] = []
        """With the front end that asked."""
        self._outputs: Outputs = {}

    def __bool__(self) -> bool:
        return bool(self._outputs or self.results)

    def collect(self, outputs: Outputs) -> None:
        """Take all outputs of a step."""
        if not self._outputs:
            self._outputs = outputs
            return
        for front_end, new in outputs.items():
            self._outputs.setdefault(front_end, []).extend(new)

    def address(self, front_end: int) -> list[RequestOutput]:
        """Return the outputs for a front end, which gets a message even if there are none."""
        return self._outputs.setdefault(front_end, [])

    def drop(self, front_end: int) -> None:
        """A front end has gone."""
        self._outputs.pop(front_end, None)
        self.results = [entry for entry in self.results if entry[0] != front_end]

    def take(self) -> tuple[Outputs, list[tuple[int, UtilityResult]]]:
        """Hand over all there is."""
        taken = self._outputs, self.results
        self._outputs, self.results = {}, []
        return taken
