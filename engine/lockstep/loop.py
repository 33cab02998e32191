"""The main thread of an engine in a lockstep group: executes the actions of `EngineWave`.

  park     block on the inbox
  gather   exchange a row with all ranks to decide what the group does
  step     schedule, and start to compute (an empty batch if there is no work)
  land     wait for the oldest step, forward its outputs, drain the inbox

If a member of the group fails, in a gather or inside a step, the engine leaves the group and waits
for the coordinator to form another. The failed steps are then repeated as planned.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine.core.engine_core import EngineCore
from engine.core.events import Drain, InboxItem, Stop, Welcomed, receive
from engine.core.front_ends import CoreStep
from engine.core.loop import ANNOUNCEMENT_SECONDS, IDLE_STATS_INTERVAL
from engine.core.sender import Outlet
from engine.core.shutdown import Shutdown
from engine.core.steps import StepFailed
from engine.core.watchdog import StepWatch
from engine.distributed.spec import GroupBroken
from engine.lockstep.deferred_calls import DeferredCalls
from engine.lockstep.grouping import Grouping
from engine.lockstep.wave import EngineWave, Gather, GatherRow, Land, Park, Step
from engine.scheduler.admission import RankState
from engine.shared.messages import FleetOrder, FormGroup, UtilityCall

if TYPE_CHECKING:
    from engine.distributed.engines import EngineGroup

logger = logging.getLogger(__name__)

GATHER_PATIENCE = 0.01
"""Seconds between checks of the clock while waiting for other ranks in a gather."""

GATHER_INTERVAL = 16
"""Steps from one gather to the next if the admission policy needs none."""


@dataclass(eq=False)
class LockstepLoop:
    """Takes part in the steps of a group."""

    core: EngineCore
    wave: EngineWave
    grouping: Grouping
    shutdown: Shutdown
    inbox: "SimpleQueue[InboxItem]"
    outlet: Outlet
    watch: StepWatch
    _: KW_ONLY
    on_iteration: Callable[[], None]
    """Called in every iteration."""
    on_drain: Callable[[], None]
    on_wave: Callable[[int], None]
    """Called after every gather."""
    on_joined: Callable[[], None]
    """Called for every new group."""

    def __post_init__(self) -> None:
        self._deferred_calls = DeferredCalls(self.core, self.wave)
        self._group: EngineGroup | None = None
        self._load: RankState | None = None
        self._launched: deque[tuple[float, int]] = deque()
        """Start time and maximum number of tokens of each step in flight."""
        self._landed_at = 0.0
        self._last_step_us = 0

    def run(self) -> Stop:
        """Step until a stop is due.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot continue.
            LockstepError: the ranks of the group are not in the same state.
        """
        self.grouping.announce()
        while True:
            stop = self.shutdown.due(time.monotonic())
            if stop is not None:
                return stop
            try:
                self._run_once()
            except GroupBroken as error:
                self._end_group()
                self.grouping.leave_broken(error)

    def end(self) -> None:
        """Abandon steps in flight after `run`, so that the group's connections can be closed."""
        with suppress(StepFailed):  # already logged
            self._end_group()

    def _run_once(self) -> None:
        """Perform one action."""
        if self._load is None:
            self._load = self.core.steps.rank_state(self._last_step_us)
        action = self.wave.next_action(self.core.needs_steps, self._load)
        self._send_reports()
        match action:
            case Park() if self._deferred_calls.settle():
                self._send_answers()
                self._send_stats()
            case Park():
                self._drain(IDLE_STATS_INTERVAL)
            case Gather(row):
                self._gather(row)
            case Step():
                self._launch(action)
            case Land(drains):
                self._land(drains=drains)

    # -- actions of the wave ---------------------------------------------------------------------

    def _gather(self, row: GatherRow) -> None:
        assert self._group is not None
        pending = self._group.all_gather_rows(row.pack())
        while not pending.wait_for(GATHER_PATIENCE):
            self.on_iteration()
            self.wave.tick(time.monotonic())
            self._send_reports()
        self.wave.gathered(pending.wait())
        self.on_wave(self.wave.wave)
        self._deferred_calls.gathered()
        if not self.wave.running:
            self._send_answers()
            self._send_stats()

    def _launch(self, action: Step) -> None:
        self._launched.append((time.monotonic(), self.core.next_tokens))
        # Without overlap the step is computed here.
        with nullcontext() if self.wave.overlaps else self._watched():
            self.core.steps.launch_together(action.number, action.loads)
        self.wave.launched()
        self._load = None
        self._send_answers()  # a request that will run alone is announced before it runs

    def _land(self, *, drains: bool) -> None:
        with self._watched() if self.wave.overlaps else nullcontext():
            step = self.core.land_together()
        now = time.monotonic()
        launched_at, _ = self._launched.popleft()
        self._last_step_us = int((now - max(launched_at, self._landed_at)) * 1e6)
        self._landed_at = now
        self.wave.landed()
        self._load = None
        self._send_step(step)
        if drains:
            self._drain(0)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watch the steps in flight; the engine is ended if they hang."""
        tokens = sum(max_tokens for _, max_tokens in self._launched)
        self.watch.begin(tokens, time.monotonic())
        try:
            yield
        finally:  # also when a lost member has failed the step
            self.watch.end()

    # -- input -----------------------------------------------------------------------------------

    def _drain(self, within: float) -> None:
        needed_steps = self.core.needs_steps
        self.on_iteration()
        items = receive(self.inbox, self.shutdown.wait(within))
        for item in items:
            self._handle(item)
        self._load = None
        self._send_answers()
        if (within and not items) or (self.core.needs_steps and not needed_steps):
            # The age of stats distinguishes idle from dead, and the start of work has to be
            # reported.
            self._send_stats()

    def _handle(self, item: InboxItem) -> None:
        match item:
            case Drain() | Stop():
                self.shutdown.request(item, time.monotonic())
                if isinstance(item, Drain):
                    self.on_drain()
            case FormGroup():
                self._form(item)
            case UtilityCall() if self._deferred_calls.take(item):
                pass
            case FleetOrder():
                for call in self.core.halting.accept(item):
                    self._handle(call)
            case Welcomed():
                pass  # it is a member already
            case _:
                self.core.handle(item)

    # -- group changes ---------------------------------------------------------------------------

    def _form(self, order: FormGroup) -> None:
        if self._group is not None and order.topology > self._group.topology:
            self._end_group()
        group = self.grouping.ordered(order)
        if group is not None:
            interval = 1 if self.core.steps.joined_group(group.size) else GATHER_INTERVAL
            self.wave.regroup(group.topology, is_leader=group.rank == 0, gather_interval=interval)
            self._group = group
            logger.info("joined group %d as %d of %d", group.topology, group.rank + 1, group.size)
            self.on_joined()

    def _end_group(self) -> None:
        """Abort the group and abandon its steps in flight."""
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        with self._watched():
            self.core.steps.abandon_pending()
        self._launched.clear()
        self.wave.group_lost()

    # -- output ----------------------------------------------------------------------------------

    def _send_reports(self) -> None:
        for report in self.wave.take_reports():
            self.outlet.report(report)

    def _send_answers(self) -> None:
        answers = self.core.answers()
        if answers is not None:
            self._send_step(answers)

    def _send_stats(self) -> None:
        self.outlet.send_step(CoreStep({}, [], self.core.stats()))

    def _send_step(self, step: CoreStep) -> None:
        """Send outputs; if they announce a request that runs alone, wait until they have
        arrived."""
        self.outlet.send_step(step)
        if step.exclusive_changes:
            time.sleep(ANNOUNCEMENT_SECONDS)
