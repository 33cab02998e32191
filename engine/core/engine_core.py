"""The body of an engine's loop: messages in, steps, outputs out. No sockets or threads."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from engine.core.load_reports import engine_setup, engine_stats
from engine.core.outbox import Outbox
from engine.core.profiles import Profiles
from engine.core.receive_counts import FrontEndCounts, News
from engine.core.utilities import call_utility
from engine.core.wave_clock import OwnClock, WaveClock
from engine.distributed.spec import GroupBroken
from engine.executor.interface import CannotDo, Executor, PendingResult
from engine.scheduler.admission import (
    NO_LOAD,
    UNLIMITED,
    AdmissionPolicy,
    AdmitAll,
    Grant,
    RankState,
)
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.scheduler.outputs import Outputs
from engine.scheduler.policies import build_admission_policy
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import EngineConfig, SchedulerConfig
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    CoreInput,
    EngineSetup,
    EngineStats,
    RequestOutput,
    UtilityCall,
    UtilityResult,
)

logger = logging.getLogger(__name__)


class StepFailed(Exception):
    """A step raised: the engine's state is unknown and it has to end. The cause is chained."""


class CoreStep(NamedTuple):
    """What a step, and the messages handled since the one before, have to say."""

    outputs: Outputs
    """By front end; empty where only the stats are news."""
    utility_results: list[tuple[int, UtilityResult]]
    """With the front end that asked."""
    stats: EngineStats
    changes_alone: bool = False
    """With the next step it changes who runs alone: everybody has to have heard so before."""


class _Launched(NamedTuple):
    """A step that was planned and whose result is not taken yet."""

    plan: BatchPlan
    pending: PendingResult | None
    """None for a plan without rows, which no executor sees."""


class EngineCore:
    """One engine: its scheduler, its executor and its books about front ends.

    With `async_scheduling` up to two steps are in flight: the next one is planned and handed to
    the executor while the one before runs, so the executor never waits for the bookkeeping.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        rank: int,
        incarnation: int,
        admission: AdmissionPolicy | None = None,
        clock: WaveClock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.clock: WaveClock = clock or OwnClock()
        self.is_paused = False
        """No step is launched until `resume`; requests are taken and wait."""
        self.is_sleeping = False
        """The same until `wake_up`, and the executor's memory is given back."""
        self._hands_over = False
        self.vocab_size = executor.info.vocab_size
        self._now = now
        self.profiles = Profiles(
            config.executor.torch_profiler_dir, executor, engine=f"{rank}-{incarnation:x}"
        )
        self._executor = executor
        self._cache = config.cache
        self._scheduling = config.scheduler
        self._admission = admission or build_admission_policy(config.scheduler, lockstep_size=1)
        self._scheduler = Scheduler(
            config.scheduler, config.cache, executor.info, executor.grammars
        )
        self._max_in_flight = _steps_in_flight(config.scheduler)
        self._in_flight: deque[_Launched] = deque()
        self._front_ends = FrontEndCounts()
        self._outbox = Outbox()
        self._step = 0
        self._num_dummy_steps = 0
        self._last_prefill_tokens = 0
        self._stats_version = 0

    @property
    def setup(self) -> EngineSetup:
        """What the engine tells the coordinator when it is ready."""
        return engine_setup(
            self._executor.info,
            self._cache,
            max_model_len=self._scheduler.max_model_len,
            max_num_seqs=self._scheduling.max_num_seqs,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        if self._in_flight or self._outbox:
            return True
        return self._scheduler.needs_step and not (self.is_paused or self.is_sleeping)

    @property
    def has_requests(self) -> bool:
        """Whether there is work, or a request that waits for something else than a step."""
        halted = self.is_paused or self.is_sleeping
        return self.has_work or (self._scheduler.has_work and not halted)

    @property
    def next_step_tokens(self) -> int:
        """Most tokens that the next step can compute."""
        gauges = self._scheduler.gauges()
        tokens = gauges.running + gauges.queued_prefill_tokens
        return min(tokens, self._scheduling.max_num_batched_tokens)

    @property
    def has_front_ends(self) -> bool:
        """Whether anybody is there who could send requests."""
        return self._front_ends.any_present

    def front_end_joined(self, index: int, incarnation: int) -> None:
        """A front end is there (again); a new incarnation replaces its predecessor."""
        if self._front_ends.joined(index, incarnation):
            self._drop_requests(index)

    def front_end_left(self, index: int) -> None:
        """A front end is gone: nobody waits for its requests any more."""
        if self._front_ends.left(index):
            self._drop_requests(index)

    def _drop_requests(self, index: int) -> None:
        self._scheduler.abort_front_end(index)
        self._outbox.drop(index)

    def handle(self, message: CoreInput) -> None:
        """Take one message of a front end. Whatever is wrong with it, only its sender is told.

        Raises:
            StepFailed: a utility had to finish the steps in flight, and one failed.
        """
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests():
                self._scheduler.abort(message.ids)
            case UtilityCall():
                if self._is_present(message.front_end, message.name):
                    result = call_utility(self, message, fatal=StepFailed)
                    self._outbox.results.append((message.front_end, result))

    def grammars_settled(self) -> None:
        """Grammars have been compiled, or could not be: what waited for them goes on."""
        self._outbox.collect(self._scheduler.queue_compiled())

    def step(self) -> CoreStep:
        """Launch a step, take the result that is due, and return everything there is to send.

        A result is due when no further step may be launched before it, or there is none to launch:
        with steps overlapped the first call only launches, and each later one launches the next
        step and then waits for the one before.

        Raises:
            StepFailed: the engine cannot go on; what was scheduled has been logged.
        """
        with self._stepping():
            launched = self._launch()
            if not launched or len(self._in_flight) == self._max_in_flight:
                self._land()
        return self._take()

    def stats(self) -> EngineStats:
        """Return load and counters as of now, newer than all stats returned before."""
        self._stats_version += 1
        scheduler = self._scheduler
        return engine_stats(
            self.rank,
            self.incarnation,
            self._stats_version,
            self.clock,
            gauges=scheduler.gauges(),
            counters=scheduler.counters,
            received=self._front_ends.received(),
            step=self._step,
            dummy_steps=self._num_dummy_steps,
            deferred=scheduler.num_deferred,
            news=self._news,
        )

    # -- for the member of a lockstep group ------------------------------------------------------

    @property
    def needs_steps(self) -> bool:
        """Whether there are requests, or the rest of a step that failed, to be computed."""
        return self._scheduler.needs_step

    def joined_group(self, size: int) -> bool:
        """Begin with a fresh admission policy, as all members of a new group do.

        Returns whether the policy needs the states of all ranks before each step.
        """
        self._admission = build_admission_policy(self._scheduling, lockstep_size=size)
        return self._admission.exchanges

    def rank_state(self, last_step_us: int) -> RankState:
        """Return what the other ranks have to know of this one before the next step."""
        if not self._admission.exchanges:
            return NO_LOAD
        return self._scheduler.rank_state(last_step_us, self._last_prefill_tokens)

    def step_together(self, number: int, loads: Sequence[RankState]) -> CoreStep:
        """Take a step of the group to its end; an empty one when there is nothing to compute.

        Args:
            number: counts the steps of the wave, alike on all ranks.
            loads: the states of all ranks, from the gather before this step.

        Raises:
            GroupBroken: a member failed. The same step is taken again when this is called next.
            StepFailed: the engine cannot go on; what was scheduled has been logged.
        """
        with self._stepping():
            grant = self._grant(number, loads)
            if not self._in_flight:
                planned = self._scheduler.schedule(grant, self._now())
                self._in_flight.append(_Launched(planned, None))
            plan = self._in_flight[0].plan
            result = self._executor.submit(plan).result()
            self._in_flight.popleft()
            self._outbox.collect(self._scheduler.update(plan, result, self._now()))
        self._step += 1
        self._num_dummy_steps += not plan.slots
        self._last_prefill_tokens = plan.num_prefill_tokens
        return self._take()

    def answers(self) -> CoreStep | None:
        """Return what there is to say without a step, if anything."""
        has_news = self._front_ends.told != self._news
        return self._take() if self._outbox or has_news else None

    # -- for operators ---------------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return how many blocks they had."""
        return self._scheduler.reset_prefix_cache()

    def pause(self, *, hand_over: bool = False) -> None:
        """Launch no more steps; all requests keep what they have, or go to other engines."""
        self.is_paused = True
        self._hands_over |= hand_over

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self._hands_over &= self.is_sleeping

    def sleep(self, level: int, *, hand_over: bool = False) -> None:
        """Give the executor's memory back; all requests wait and will be computed again.

        Level 1 keeps the weights where they are quick to have again, level 2 does not.
        With `hand_over` requests go to other engines as soon as one can take them.
        """
        if self._in_flight and self._in_flight[0].pending is None and self._in_flight[0].plan.slots:
            raise CannotDo("a step that its group gave up has to be finished first")
        with self._stepping():
            while self._in_flight:
                self._land()
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()
        self.is_sleeping = True
        self._hands_over |= hand_over
        self._executor.sleep(level)

    def wake_up(self) -> None:
        """End a sleep.

        Raises:
            Exception: the executor cannot; the engine sleeps on.
        """
        self._executor.wake_up()
        self.is_sleeping = False
        self._hands_over &= self.is_paused

    # -- parts of a step -------------------------------------------------------------------------

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Turn whatever goes wrong inside into StepFailed, with a description in the log."""
        try:
            yield
        except GroupBroken:
            raise
        except Exception as error:
            logger.exception("step failed: %s", self._scheduler.describe_in_flight())
            raise StepFailed(f"engine {self.rank}: {type(error).__name__} in a step") from error

    def _grant(self, number: int, loads: Sequence[RankState] = ()) -> Grant:
        if isinstance(self._admission, AdmitAll):
            return UNLIMITED  # the state of a rank is not for free
        return self._admission.decide(number, loads or (self._scheduler.rank_state(),))

    def _launch(self) -> bool:
        """Plan a step and start it; False when there is nothing to compute now."""
        if self.is_paused or self.is_sleeping:
            return False
        plan = self._scheduler.schedule(self._grant(self._step), self._now())
        if not plan.slots:
            self._in_flight.append(_Launched(plan, None))
            return False
        self._step += 1
        self._in_flight.append(_Launched(plan, self._executor.submit(plan)))
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight, if any; take its result, and empty ones after it."""
        if self._in_flight:
            self._take_result()
        while self._in_flight and self._in_flight[0].pending is None:
            self._take_result()

    def _take_result(self) -> None:
        plan, pending = self._in_flight.popleft()
        result = BatchResult([]) if pending is None else pending.result()
        self._outbox.collect(self._scheduler.update(plan, result, self._now()))

    @property
    def _news(self) -> News:
        halted = self.is_paused or self.is_sleeping
        return News(halted, self._hands_over, self._scheduler.alone)

    def _take(self) -> CoreStep:
        was_alone = self._front_ends.told.alone
        for front_end in self._front_ends.to_tell(self._news):
            self._outbox.address(front_end)
        outputs, results = self._outbox.take()
        for front_end in outputs:
            self._front_ends.count_outputs(front_end)
        changes_alone = self._scheduler.alone != was_alone
        return CoreStep(outputs, results, self.stats(), changes_alone)

    def _add(self, message: AddRequest) -> None:
        if not self._is_present(message.front_end, message.request_id):
            return
        self._front_ends.count_request(message)
        if logger.isEnabledFor(logging.DEBUG):
            name = message.request_id
            logger.debug("request %s arrived", name, extra={"request_id": name})
        try:
            answer = self._scheduler.add(message, self._now())
        except Exception as error:  # nothing of it has been queued: it fails alone
            name = message.request_id
            logger.exception("request %s could not be queued", name, extra={"request_id": name})
            answer = RequestOutput(message.id, [], "error", error=f"{type(error).__name__}")
        if answer is not None:
            self._outbox.address(message.front_end).append(answer)

    def _is_present(self, index: int, what: str) -> bool:
        """Return whether somebody waits for an answer; say what is dropped if nobody does."""
        present = self._front_ends.is_present(index)
        if not present:
            logger.warning("%s dropped: front end %d is not there", what, index)
        return present


def _steps_in_flight(scheduling: SchedulerConfig) -> int:
    if scheduling.async_scheduling and not scheduling.steps_overlap:
        logger.info(
            "steps run one after the other: --speculative-ngram needs the tokens of the last one"
        )
    return 2 if scheduling.steps_overlap else 1
