"""Calls of engine utilities: every engine that was called gets a result, whatever happens to it.

A state machine without I/O. A call remembers the process that it went to: the end of another
process of the same rank does not matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.shared.messages import UtilityCall, UtilityResult
from server.router.events import Action, Call, CallResult, Refuse, Send
from server.router.generation_client import NoEngineAvailable
from server.router.route import Engine, Route


@dataclass
class _OpenCall:
    """One call, to one engine or to several."""

    awaited: dict[int, int]
    """Incarnations of the engines that have not answered, by rank."""
    results: dict[int, UtilityResult] = field(default_factory=dict)


class UtilityCalls:
    """Calls that are not over, by the ids that their callers gave them."""

    def __init__(self, front_end: int) -> None:
        self._front_end = front_end
        self._open: dict[int, _OpenCall] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, call: Call, routes: Iterable[Route]) -> list[Action]:
        """Call one engine or all, if they are there."""
        called = [
            route for route in routes if route.is_open and call.rank in (None, route.entry.rank)
        ]
        if not called:
            which = "no engine can" if call.rank is None else f"engine {call.rank} cannot"
            return [Refuse(NoEngineAvailable(f"{which} be called now"))]
        self._open[call.call_id] = _OpenCall(dict(route.engine for route in called))
        message = UtilityCall(call.call_id, self._front_end, call.name, call.arguments)
        return [Send(route.identity or b"", *route.engine, message) for route in called]

    def answered(self, result: UtilityResult) -> list[Action]:
        """Take an answer; one that is not awaited is dropped."""
        call = self._open.get(result.call_id)
        if call is None or call.awaited.pop(result.rank, None) is None:
            return []
        call.results[result.rank] = result
        if call.awaited:
            return []
        del self._open[result.call_id]
        return [CallResult(result.call_id, [call.results[rank] for rank in sorted(call.results)])]

    def engine_lost(self, engine: Engine) -> list[Action]:
        """Answer for an engine process that has gone."""
        rank, incarnation = engine
        actions: list[Action] = []
        for call_id, call in list(self._open.items()):
            if call.awaited.get(rank) == incarnation:
                error = f"engine {rank} died before it answered"
                actions += self.answered(UtilityResult(call_id, rank, error=error))
        return actions

    def overdue(self, call_id: int, why: str) -> list[Action]:
        """Answer for all engines that have not answered: the caller waits no longer."""
        call = self._open.get(call_id)
        actions: list[Action] = []
        for rank in list(call.awaited) if call is not None else ():
            error = f"engine {rank} did not answer {why}; it may do it yet"
            actions += self.answered(UtilityResult(call_id, rank, error=error))
        return actions
