"""The main thread of an engine that steps alone: does what `Turns` says."""

import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import assert_never

from engine.core.engine_core import EngineCore
from engine.process.events import InboxItem, Stop
from engine.process.inbox import receive
from engine.process.sender import Outlet
from engine.process.turns import Action, Compute, End, RefuseNew, Rest, Say, Settle, Turns
from engine.process.watchdog import StepWatch


class EngineLoop:
    """Steps whenever there is work and sleeps on the inbox otherwise."""

    def __init__(
        self,
        core: EngineCore,
        turns: Turns,
        inbox: "SimpleQueue[InboxItem]",
        outlet: Outlet,
        watch: StepWatch,
        *,
        on_turn: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        """Wire a loop; `on_turn` is called for as long as it goes round."""
        self._core = core
        self._turns = turns
        self._inbox = inbox
        self._outlet = outlet
        self._watch = watch
        self._on_turn = on_turn
        self._on_drain = on_drain
        self._wait = 0.0
        self._stop: Stop | None = None

    def run(self) -> Stop:
        """Step until something asks to stop.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot go on.
        """
        while self._stop is None:
            self._on_turn()
            items = receive(self._inbox, self._wait)
            self._wait = 0.0
            self._do(self._turns.turn(items, time.monotonic()))
        return self._stop

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Compute(tokens):
                    self._compute(tokens)
                case Say(step):
                    self._outlet.say(step)
                case Rest(seconds):
                    self._wait = seconds
                case Settle(seconds):
                    time.sleep(seconds)
                case RefuseNew():
                    self._on_drain()
                case End(stop):
                    self._stop = stop
                case _:
                    assert_never(action)

    def _compute(self, tokens: int) -> None:
        self._watch.begin(tokens, time.monotonic())
        step = self._core.step()
        self._watch.end()
        self._do(self._turns.computed(step, time.monotonic()))
