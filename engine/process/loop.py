"""The main thread of an engine that steps alone: take what came, step, hand the outputs on."""

import time

from engine.core.engine_core import CoreStep, EngineCore
from engine.process.intake import Intake
from engine.process.receiver import InboxItem, Rejoined, Stop
from engine.process.sender import Outbox, StepDone, UtilityDone
from engine.process.watchdog import StepWatch
from engine.shared.messages import StartDpWave

IDLE_STATS_INTERVAL = 2.0
"""Seconds between stats of an engine without work, so that their age tells stale from idle."""


ANNOUNCEMENT_SECONDS = 0.05
"""Pause before the first step of a request that runs alone because it may kill, and before the
first of others after it: sockets write in a thread of their own, and what they have not written
dies with the engine."""


def send_step(outbox: Outbox, step: CoreStep) -> None:
    """Hand on what a step has to say; return when whoever has to know first will know."""
    outbox.put(StepDone(step.stats, step.outputs))
    for front_end, result in step.utility_results:
        outbox.put(UtilityDone(front_end, result))
    if step.changes_alone:
        time.sleep(ANNOUNCEMENT_SECONDS)


class EngineLoop:
    """Steps whenever there is work and sleeps on the inbox otherwise."""

    def __init__(
        self,
        core: EngineCore,
        intake: Intake,
        outbox: Outbox,
        watch: StepWatch,
    ) -> None:
        self._core = core
        self._watch = watch
        self._intake = intake
        self._outbox = outbox

    def run(self) -> Stop:
        """Step until something asks to stop.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot go on.
        """
        while True:
            had_work = self._core.has_work
            self._drain(block=not had_work)
            stop = self._intake.stopped()
            if stop is not None:
                return stop
            if not self._core.has_work:
                continue
            if not had_work:
                # Work that begins and ends within one step has to be seen to have begun.
                self._outbox.put(StepDone(self._core.stats(), {}))
            self._watch.begin(self._core.next_step_tokens, time.monotonic())
            step = self._core.step()
            self._watch.end()
            send_step(self._outbox, step)

    def _drain(self, *, block: bool) -> None:
        items = self._intake.receive(IDLE_STATS_INTERVAL if block else 0)
        if block and not items:
            self._outbox.put(StepDone(self._core.stats(), {}))
        for item in items:
            self._take(item)

    def _take(self, item: InboxItem) -> None:
        match item:
            case StartDpWave(wave) | Rejoined(wave):
                self._core.clock.wave = max(self._core.clock.wave, wave)
            case _:
                self._intake.take(item)
