"""The main thread of an engine that steps alone: does what `Turns` says."""

import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import assert_never

from engine.core.front_ends import CoreStep
from engine.core.hosted import HostedEngine
from engine.core.inbox import InboxItem, Stop, receive
from engine.core.sender import Outlet
from engine.core.turns import Action, Compute, End, RefuseNew, Rest, Say, Settle, Turns
from engine.core.watchdog import StepWatch


class EngineLoop:
    """Steps whenever there is work and sleeps on the inbox otherwise.

    `run` waits in real time; tests that have a time of their own call `turn` instead.
    """

    def __init__(
        self,
        core: HostedEngine,
        turns: Turns,
        inbox: "SimpleQueue[InboxItem]",
        outlet: Outlet,
        watch: StepWatch,
        *,
        on_turn: Callable[[], None],
        on_drain: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire a loop; `on_turn` is called in each of its turns."""
        self._core = core
        self._turns = turns
        self._inbox = inbox
        self._outlet = outlet
        self._watch = watch
        self._on_turn = on_turn
        self._on_drain = on_drain
        self._clock = clock
        self.wait = 0.0
        """Seconds until the next turn, unless something comes into the inbox."""
        self.stopped: Stop | None = None
        """Why the loop has ended."""

    def run(self) -> Stop:
        """Step until something asks to stop.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot go on.
        """
        while self.stopped is None:
            self._on_turn()
            self.turn(receive(self._inbox, self.wait))
        return self.stopped

    def turn(self, items: Sequence[InboxItem]) -> None:
        """Take what has come into the inbox, and do what there is to do."""
        self.wait = 0.0
        self._do(self._turns.turn(items, self._clock()))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Compute(tokens):
                    self.compute(tokens)
                case Say(step):
                    self._outlet.say(step)
                case Rest(seconds):
                    self.wait = seconds
                case Settle(seconds):
                    self.settle(seconds)
                case RefuseNew():
                    self._on_drain()
                case End(stop):
                    self.stopped = stop
                case _:
                    assert_never(action)

    def settle(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)

    def compute(self, tokens: int) -> None:
        """Take a step of at most this many tokens."""
        self._watch.begin(tokens, self._clock())
        self.computed(self._core.step())

    def computed(self, step: CoreStep) -> None:
        """A step is over."""
        self._watch.end()
        self._do(self._turns.computed(step, self._clock()))
