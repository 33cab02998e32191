"""The steps of an engine: planned by its scheduler, computed by its executor."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    RankState,
)
from engine.scheduler.policies import build_admission_policy
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import SchedulerConfig

logger = logging.getLogger(__name__)


class StepFailed(Exception):
    """A step raised: the engine's state is unknown and it has to end. The cause is chained."""


class _Launched(NamedTuple):
    """A step that was planned and whose result is not taken yet."""

    plan: BatchPlan
    pending: PendingResult | None
    """None for a plan without rows, which no executor sees, and for one that a group gave up."""

    @property
    def is_given_up(self) -> bool:
        """Whether rows of it are still to be computed, in another group."""
        return self.pending is None and bool(self.plan.slots)


class Steps:
    """Launches steps and takes their results, which go to the front ends.

    Methods raise `StepFailed` when the engine cannot go on, and log what was scheduled.

    As many steps are in flight as the executor has stages, so that each of these computes one.
    With `async_scheduling` it is one more: that is planned and handed to the executor while the
    others run, so the executor never waits for the bookkeeping.
    """

    def __init__(
        self,
        rank: int,
        config: SchedulerConfig,
        scheduler: Scheduler,
        executor: Executor,
        front_ends: FrontEnds,
        *,
        admission: AdmissionPolicy | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        """Steps launched so far; of a group, those that are over."""
        self._rank = rank
        self._config = config
        self._scheduler = scheduler
        self._executor = executor
        self._front_ends = front_ends
        self._admission = admission or build_admission_policy(config, lockstep_size=1)
        self._now = now
        if config.async_scheduling and not config.steps_overlap:
            logger.info(
                "steps run one after the other: draft tokens follow those that the last one drew"
            )
        self._max_in_flight = executor.info.num_stages + config.steps_overlap
        self._in_flight: deque[_Launched] = deque()
        self._last_prefill_tokens = 0

    @property
    def are_in_flight(self) -> bool:
        """Whether a result is still to be taken."""
        return bool(self._in_flight)

    @property
    def have_rows(self) -> bool:
        """Whether a result is still to be taken that is about a request."""
        return any(each.plan.slots for each in self._in_flight)

    @property
    def are_given_up(self) -> bool:
        """Whether a step has to be launched again, in another group."""
        return bool(self._in_flight) and self._in_flight[-1].pending is None

    # -- of an engine that steps alone -----------------------------------------------------------

    def advance(self, *, may_launch: bool) -> None:
        """Launch a step if one may be launched, and take the result that is due.

        A result is due when no further step may be launched before it, or there is none to launch:
        with steps overlapped the first call only launches, and each later one launches the next
        step and then waits for the one before.
        """
        with self._described():
            launched = may_launch and self._launch()
            if not launched or len(self._in_flight) == self._max_in_flight:
                self._land()

    def vacate(self) -> None:
        """Take the results of all steps in flight, then give up all slots, blocks and prefixes.

        Raises:
            CannotDo: a step was given up by its group, and has to be taken again first.
        """
        if any(each.is_given_up for each in self._in_flight):
            raise CannotDo("a step that its group gave up has to be finished first")
        with self._described():
            while self._in_flight:
                self._land()
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()

    # -- of the member of a lockstep group -------------------------------------------------------

    def joined_group(self, size: int) -> bool:
        """Begin with a fresh admission policy, as all members of a new group do.

        Returns whether the policy needs the states of all ranks before each step.
        """
        self._admission = build_admission_policy(self._config, lockstep_size=size)
        return self._admission.exchanges

    def rank_state(self, last_step_us: int) -> RankState:
        """Return what the other ranks have to know of this one before the next step."""
        if not self._admission.exchanges:
            return NO_LOAD
        return self._scheduler.rank_state(last_step_us, self._last_prefill_tokens)

    def launch_together(self, number: int, loads: Sequence[RankState]) -> None:
        """Launch a step of the group; an empty one when there is nothing to compute.

        What the group before has given up comes first, as it was planned.

        Raises:
            GroupBroken: a member failed, and `give_up` has to follow.
        """
        with self._described(GroupBroken):
            grant = self._grant(number, loads)
            pending = [each.pending for each in self._in_flight]
            place = pending.index(None) if None in pending else len(pending)
            if place == len(pending):
                plan = self._scheduler.schedule(grant, self._now())
                self._in_flight.append(_Launched(plan, None))
            plan = self._in_flight[place].plan
            self._in_flight[place] = _Launched(plan, self._executor.submit(plan))

    def land_together(self) -> None:
        """Wait for the oldest step of the group in flight, and take its result.

        Raises:
            GroupBroken: a member failed, and `give_up` has to follow.
        """
        with self._described(GroupBroken):
            self._land_oldest()

    def give_up(self) -> None:
        """The group has ended: take the results that are there, and keep the plans of the others.

        These are launched again in another group. All steps in flight are over afterwards.
        """
        with self._described():
            with suppress(GroupBroken):
                while self._in_flight and self._in_flight[0].pending is not None:
                    self._land_oldest()
            for place, (plan, pending) in enumerate(self._in_flight):
                if pending is not None:
                    self._in_flight[place] = _Launched(plan, None)
                    with suppress(GroupBroken):
                        pending.result()
                        raise AssertionError("a step has followed one that was given up")

    # -- parts of a step -------------------------------------------------------------------------

    @contextmanager
    def _described(self, *others: type[Exception]) -> Iterator[None]:
        """Describe in the log what fails within, and raise StepFailed for it, but for `others`."""
        try:
            yield
        except others:
            raise
        except Exception as error:
            logger.error("step failed: %s", self._scheduler.describe_in_flight(), exc_info=error)
            name = type(error).__name__
            raise StepFailed(f"engine {self._rank}: {name} in a step") from error

    def _grant(self, number: int, loads: Sequence[RankState] = ()) -> Grant:
        if isinstance(self._admission, AdmitAll):
            return UNLIMITED  # the state of a rank is not for free
        if not loads or not self._admission.exchanges:
            loads = (self._scheduler.rank_state(),)
        return self._admission.decide(number, loads)

    def _launch(self) -> bool:
        """Plan a step and start it; False when there is nothing to compute now."""
        plan = self._scheduler.schedule(self._grant(self.count), self._now())
        if not plan.slots:
            self._in_flight.append(_Launched(plan, None))
            return False
        self.count += 1
        self._in_flight.append(_Launched(plan, self._executor.submit(plan)))
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight, if any; take its result, and empty ones after it."""
        if self._in_flight:
            self._take_result()
        while self._in_flight and self._in_flight[0].pending is None:
            self._take_result()

    def _land_oldest(self) -> None:
        """Take the result of the group's oldest step in flight."""
        plan, pending = self._in_flight[0]
        assert pending is not None, "it has to be launched again"
        result = pending.result()
        self._in_flight.popleft()
        self._front_ends.collect(self._scheduler.update(plan, result, self._now()))
        self.count += 1
        if not plan.slots:
            self._scheduler.counters.dummy_steps += 1
        self._last_prefill_tokens = plan.num_prefill_tokens

    def _take_result(self) -> None:
        plan, pending = self._in_flight.popleft()
        result = BatchResult([]) if pending is None else pending.result()
        self._front_ends.collect(self._scheduler.update(plan, result, self._now()))
