"""Operators' calls that concern a whole lockstep group: pause, resume, sleep, wake_up.

An engine may only stop, or give its memory back, when all ranks of its group have stopped at the
same point. So a call to one of them holds the group and waits until it is held; and the end of a
hold, whichever rank was asked for it, ends it for all.
"""

from engine.core.engine_core import EngineCore
from engine.lockstep.wave import EngineWave
from engine.shared.messages import UtilityCall

_HOLDS = {"pause": "resume", "sleep": "wake_up"}
"""Calls that need a hold, and what ends each."""
_ENDS = {end: begin for begin, end in _HOLDS.items()}


class HeldCalls:
    """The calls that wait for the group of one rank to be held, and why it is held."""

    def __init__(self, core: EngineCore, wave: EngineWave) -> None:
        self._core = core
        self._wave = wave
        self._waiting: list[UtilityCall] = []
        self._reasons: set[str] = set()

    def take(self, call: UtilityCall) -> bool:
        """Take a call if it is one of these."""
        if call.name == "pause" and call.arguments.get("mode") == "wait":
            return False  # each rank runs out of work, and then the group does
        if call.name in _HOLDS:
            self._reasons.add(call.name)
            self._wave.pause_requested()
        elif call.name not in _ENDS:
            return False
        self._waiting.append(call)
        if not self._reasons:
            self._answer()  # nothing is held here
        return True

    def settle(self) -> bool:
        """Carry out what has waited, if the group is held; whether anything has changed."""
        if not self._wave.held or (self._core.halting.is_paused and not self._waiting):
            return False
        self._answer()
        self._core.halting.pause()
        return True

    def gathered(self) -> None:
        """The ranks have agreed on what to do; if that is not to be held, a hold is over."""
        if self._wave.held or not self._core.halting.is_paused:
            return
        self._reasons.clear()
        if self._core.halting.is_sleeping:
            self._core.operations.wake_up()
        self._core.halting.resume()
        # This rank may have been asked as well, after it heard of the end and before it came.
        granted = [call for call in self._waiting if call.name in _ENDS]
        self._waiting = [call for call in self._waiting if call.name not in _ENDS]
        for call in granted:
            self._core.handle(call)
        # So it may with what needs a hold, which the one that is over now seemed to give.
        self._reasons.update(call.name for call in self._waiting)
        if self._waiting:
            self._wave.pause_requested()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._core.handle(call)
            if call.name == "wake_up" and self._core.halting.is_sleeping:
                continue  # it has a part of its memory back, or none
            self._reasons.discard(_ENDS.get(call.name, ""))
            if call.name in _ENDS and not self._reasons:
                self._wave.resume_requested()
