"""An engine's steps: planned by its scheduler, computed by its executor."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import CannotDo, Executor, PendingResult
from engine.core.front_ends import FrontEnds
from engine.distributed.spec import GroupBroken
from engine.scheduler.admission import (
    NO_LOAD,
    UNLIMITED,
    AdmissionPolicy,
    AdmitAll,
    Grant,
    PolicyFailed,
    RankState,
)
from engine.scheduler.policies import build_admission_policy
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import SchedulerConfig

logger = logging.getLogger(__name__)


class StepFailed(Exception):
    """A step raised: the engine's state is unknown and it has to exit. The cause is chained."""


class _Launched(NamedTuple):
    """A planned step whose result is pending."""

    plan: BatchPlan
    pending: PendingResult | None
    """None for a plan without rows, which is not submitted, and for an abandoned step."""

    @property
    def is_abandoned(self) -> bool:
        """Whether its rows still have to be computed, in another group."""
        return self.pending is None and bool(self.plan.slots)


@dataclass(eq=False)
class Steps:
    """Launches steps and passes their results to the front ends.

    Methods raise `StepFailed` when the engine cannot continue, and log the scheduled requests.

    The number of steps in flight equals the executor's pipeline stages, so that each stage computes
    one. With `async_scheduling` there is one more: it is planned and submitted while the others
    run, so that the executor never waits for the bookkeeping.
    """

    rank: int
    config: SchedulerConfig
    scheduler: Scheduler
    executor: Executor
    front_ends: FrontEnds
    _: KW_ONLY
    admission: AdmissionPolicy | None = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.count = 0
        """Steps launched so far; in a group, steps completed."""
        self._admission = self.admission or build_admission_policy(self.config, lockstep_size=1)
        if self.config.async_scheduling and not self.config.steps_overlap:
            logger.info("steps do not overlap: drafting needs the previous step's tokens")
        self._max_in_flight = self.executor.info.num_stages + self.config.steps_overlap
        self.in_flight: deque[_Launched] = deque()
        self._last_prefill_tokens = 0

    @property
    def any_abandoned(self) -> bool:
        """Whether a step has to be launched again, in another group."""
        return bool(self.in_flight) and self.in_flight[-1].pending is None

    # -- independent engines ---------------------------------------------------------------------

    def advance(self, *, may_launch: bool) -> None:
        """Launch a step if possible, and process the result that is due.

        A result is due when no further step can be launched before it, or there is none to launch:
        with overlapped steps the first call only launches, and each later one launches the next
        step and then waits for the previous one.
        """
        with self._described():
            launched = may_launch and self._launch()
            if not launched or len(self.in_flight) == self._max_in_flight:
                self._land()

    def vacate(self) -> None:
        """Finish all steps in flight, then release all slots, blocks and prefixes.

        Raises:
            CannotDo: a step that a broken group abandoned has to be repeated first.
        """
        if any(each.is_abandoned for each in self.in_flight):
            raise CannotDo("a step that its group abandoned has to be finished first")
        with self._described():
            while self.in_flight:
                self._land()
            self.scheduler.preempt_all()
            self.scheduler.reset_prefix_cache()

    # -- members of a lockstep group -------------------------------------------------------------

    def joined_group(self, size: int) -> bool:
        """Start with a fresh admission policy, as all members of a new group do.

        Returns:
            Whether the policy needs the states of all ranks before each step.
        """
        self._admission = build_admission_policy(self.config, lockstep_size=size)
        return self._admission.exchanges

    def rank_state(self, last_step_us: int) -> RankState:
        """Return this rank's state for the other ranks before the next step."""
        if not self._admission.exchanges:
            return NO_LOAD
        return self.scheduler.rank_state(last_step_us, self._last_prefill_tokens)

    def launch_together(self, number: int, loads: Sequence[RankState]) -> None:
        """Launch a step of the group; an empty one if there is nothing to compute.

        Steps that the previous group abandoned are launched first, as planned.

        Raises:
            GroupBroken: a member failed; `abandon_pending` has to follow.
        """
        with self._described(GroupBroken):
            grant = self._grant(number, loads)
            pending = [each.pending for each in self.in_flight]
            index = pending.index(None) if None in pending else len(pending)
            if index == len(pending):
                plan = self.scheduler.schedule(grant, self.now())
                self.in_flight.append(_Launched(plan, None))
            plan = self.in_flight[index].plan
            self.in_flight[index] = _Launched(plan, self.executor.submit(plan))

    def land_together(self) -> None:
        """Wait for the group's oldest step in flight, and process its result.

        Raises:
            GroupBroken: a member failed; `abandon_pending` has to follow.
        """
        with self._described(GroupBroken):
            self._land_oldest()

    def abandon_pending(self) -> None:
        """Handle the end of the group: process available results, keep the plans of other steps.

        These are launched again in another group. Afterwards no step is running.
        """
        with self._described():
            with suppress(GroupBroken):
                while self.in_flight and self.in_flight[0].pending is not None:
                    self._land_oldest()
            for index, (plan, pending) in enumerate(self.in_flight):
                if pending is not None:
                    self.in_flight[index] = _Launched(plan, None)
                    with suppress(GroupBroken):
                        pending.result()
                        raise AssertionError("a step followed an abandoned one")

    # -- helpers ---------------------------------------------------------------------------------

    @contextmanager
    def _described(self, *others: type[Exception]) -> Iterator[None]:
        """Log the scheduled requests and raise StepFailed on any exception but `others`."""
        try:
            yield
        except others:
            raise
        except Exception as error:
            logger.error("step failed: %s", self.scheduler.describe_in_flight(), exc_info=error)
            reason = f"{type(error).__name__} in a step"  # its text may quote a request
            if isinstance(error, PolicyFailed):
                reason = str(error)
            raise StepFailed(f"engine {self.rank}: {reason}") from error

    def _grant(self, number: int, loads: Sequence[RankState] = ()) -> Grant:
        if isinstance(self._admission, AdmitAll):
            return UNLIMITED  # avoids the cost of computing the rank's state
        if not loads or not self._admission.exchanges:
            loads = (self.scheduler.rank_state(),)
        return self._admission.decide(number, loads)

    def _launch(self) -> bool:
        """Plan a step and start it; return False if there is nothing to compute now."""
        plan = self.scheduler.schedule(self._grant(self.count), self.now())
        if not plan.slots:
            self.in_flight.append(_Launched(plan, None))
            return False
        self.count += 1
        self.in_flight.append(_Launched(plan, self.executor.submit(plan)))
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight, if any, and process its result and empty ones after
        it."""
        if self.in_flight:
            self._take_result()
        while self.in_flight and self.in_flight[0].pending is None:
            self._take_result()

    def _land_oldest(self) -> None:
        plan, pending = self.in_flight[0]
        assert pending is not None, "it has to be launched again"
        result = pending.result()
        self.in_flight.popleft()
        self.front_ends.collect(self.scheduler.update(plan, result, self.now()))
        self.count += 1
        if not plan.slots:
            self.scheduler.counters.dummy_steps += 1
        self._last_prefill_tokens = plan.num_prefill_tokens

    def _take_result(self) -> None:
        plan, pending = self.in_flight.popleft()
        result = BatchResult([]) if pending is None else pending.result()
        self.front_ends.collect(self.scheduler.update(plan, result, self.now()))
