"""Operator calls that affect a whole lockstep group: pause, resume, sleep, wake_up.

An engine can stop, or release its memory, only when all ranks of its group have stopped at the same
point. So such a call on any rank requests a hold of the group and waits for it; and the end of a
hold, on whichever rank it was requested, ends it for all.
"""

from engine.core.engine_core import EngineCore
from engine.lockstep.wave import EngineWave
from engine.shared.messages import UtilityCall

_HOLDS = {"pause": "resume", "sleep": "wake_up"}
"""Calls that need a hold, and the call that ends each."""
_ENDS = {end: begin for begin, end in _HOLDS.items()}


class DeferredCalls:
    """One rank's calls that wait for the group to be held, and the reasons for the hold."""

    def __init__(self, core: EngineCore, wave: EngineWave) -> None:
        self._core = core
        self._wave = wave
        self._waiting: list[UtilityCall] = []
        self._reasons: set[str] = set()

    def take(self, call: UtilityCall) -> bool:
        """Take ownership of a call if it is one of these; return whether it is."""
        if call.name == "pause" and call.arguments.get("mode") == "wait":
            return False  # each rank runs out of work, and then the group does
        if call.name in _HOLDS:
            self._reasons.add(call.name)
            self._wave.pause_requested()
        elif call.name not in _ENDS:
            return False
        self._waiting.append(call)
        if not self._reasons:
            self._answer()  # there is no hold to end
        return True

    def settle(self) -> bool:
        """Carry out waiting calls if the group is held; return whether anything has changed."""
        if not self._wave.held or (self._core.halting.is_paused and not self._waiting):
            return False
        self._answer()
        self._core.halting.pause()
        return True

    def gathered(self) -> None:
        """Handle the result of a gather: if the group is no longer held, resume."""
        if self._wave.held or not self._core.halting.is_paused:
            return
        self._reasons.clear()
        if self._core.halting.is_sleeping:
            self._core.operations.wake_up()
        self._core.halting.resume()
        # This rank may have received such a call too, between the request and the end of the hold.
        granted = [call for call in self._waiting if call.name in _ENDS]
        self._waiting = [call for call in self._waiting if call.name not in _ENDS]
        for call in granted:
            self._core.handle(call)
        # Likewise calls that need a hold, which seemed to be covered by the one that has ended.
        self._reasons.update(call.name for call in self._waiting)
        if self._waiting:
            self._wave.pause_requested()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._core.handle(call)
            if call.name == "wake_up" and self._core.halting.is_sleeping:
                continue  # at most a part of its memory is back
            self._reasons.discard(_ENDS.get(call.name, ""))
            if call.name in _ENDS and not self._reasons:
                self._wave.resume_requested()
