"""The body of an engine's loop: messages in, steps, outputs out. No sockets, clock or threads."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.executor.interface import Executor
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineSetup,
    EngineStats,
    Received,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from engine.scheduler.admission import AdmissionPolicy, AdmitAll
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.scheduler.outputs import Outputs
from engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepFailed(Exception):
    """A step raised: the engine's state is unknown and it has to end. The cause is chained."""


class CoreStep(NamedTuple):
    """What a step, and the messages handled since the one before, have to say."""

    outputs: Outputs
    """By front end; none is empty."""
    utility_results: list[tuple[int, UtilityResult]]
    """With the front end that asked."""
    stats: EngineStats


@dataclass(slots=True)
class _FrontEnd:
    """One front-end process, and what was received from it."""

    incarnation: int
    present: bool = True
    requests: int = 0
    prompt_tokens: int = 0


class EngineCore:
    """One engine: its scheduler, its executor and its books about front ends."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        rank: int,
        incarnation: int,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.wave = 0
        self._executor = executor
        self._block_size = config.cache.block_size
        self._admission: AdmissionPolicy = AdmitAll() if admission is None else admission
        self._scheduler = Scheduler(config.scheduler, config.cache, executor.info)
        self._front_ends: dict[int, _FrontEnd] = {}
        self._outputs: Outputs = {}
        self._utility_results: list[tuple[int, UtilityResult]] = []
        self._step = 0
        self._stats_version = 0

    @property
    def setup(self) -> EngineSetup:
        """What the engine tells the coordinator when it is ready."""
        info = self._executor.info
        return EngineSetup(
            info.num_kv_blocks,
            self._block_size,
            self._scheduler.max_model_len,
            info.model_fingerprint,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return bool(self._scheduler.has_work or self._outputs or self._utility_results)

    def front_end_joined(self, index: int, incarnation: int) -> None:
        """A front end is there (again); a new incarnation replaces its predecessor."""
        known = self._front_ends.get(index)
        if known is not None and known.incarnation == incarnation:
            known.present = True
            return
        self.front_end_left(index)
        self._front_ends[index] = _FrontEnd(incarnation)

    def front_end_left(self, index: int) -> None:
        """A front end is gone: nobody waits for its requests any more."""
        known = self._front_ends.get(index)
        if known is None:
            return
        # The counts stay: the same process may turn out to be alive, and counts only grow.
        known.present = False
        self._scheduler.abort_front_end(index)
        self._outputs.pop(index, None)
        self._utility_results = [entry for entry in self._utility_results if entry[0] != index]

    def handle(self, message: EngineInput) -> None:
        """Take one message of a front end. Whatever is wrong with it, only its sender is told."""
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests():
                self._scheduler.abort(message.ids)
            case UtilityCall():
                if self._present(message.front_end, message.name) is not None:
                    result = self._call_utility(message)
                    self._utility_results.append((message.front_end, result))

    def step(self) -> CoreStep:
        """Run one step and return everything there is to send.

        Raises:
            StepFailed: the engine cannot go on; what was scheduled has been logged.
        """
        try:
            plan = self._schedule()
            result = self._execute(plan)
            self._collect(self._scheduler.update(plan, result))
        except Exception as error:
            logger.exception("step failed: %s", self._scheduler.describe_in_flight())
            raise StepFailed(f"engine {self.rank}: {type(error).__name__} in a step") from error
        return self._take()

    def stats(self) -> EngineStats:
        """Return load and counters as of now, newer than all stats returned before."""
        self._stats_version += 1
        gauges = self._scheduler.gauges()
        counters = self._scheduler.counters
        return EngineStats(
            rank=self.rank,
            incarnation=self.incarnation,
            version=self._stats_version,
            wave=self.wave,
            step=self._step,
            waiting=gauges.waiting,
            running=gauges.running,
            kv_usage=gauges.kv_usage,
            queued_prefill_tokens=gauges.queued_prefill_tokens,
            received=[
                Received(index, entry.incarnation, entry.requests, entry.prompt_tokens)
                for index, entry in self._front_ends.items()
                if entry.present
            ],
            prefix_cache_queries_total=counters.prefix_cache_queries,
            prefix_cache_hits_total=counters.prefix_cache_hits,
            preemptions_total=counters.preemptions,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
        )

    def _schedule(self) -> BatchPlan:
        grant = self._admission.decide(self._step, (self._scheduler.rank_state(),))
        return self._scheduler.schedule(grant)

    def _execute(self, plan: BatchPlan) -> BatchResult:
        if not plan.slots:
            return BatchResult([])
        self._step += 1
        return self._executor.submit(plan).result()

    def _collect(self, outputs: Outputs) -> None:
        if not self._outputs:
            self._outputs = outputs
            return
        for front_end, new in outputs.items():
            self._outputs.setdefault(front_end, []).extend(new)

    def _take(self) -> CoreStep:
        step = CoreStep(self._outputs, self._utility_results, self.stats())
        self._outputs = {}
        self._utility_results = []
        return step

    def _add(self, message: AddRequest) -> None:
        front_end = self._present(message.front_end, message.request_id)
        if front_end is None:
            return
        front_end.requests += 1
        front_end.prompt_tokens += len(message.prompt_token_ids)
        answer = self._scheduler.add(message)
        if answer is not None:
            self._outputs.setdefault(message.front_end, []).append(answer)

    def _present(self, index: int, what: str) -> _FrontEnd | None:
        """Return the front end, or None (and a line in the log) if nobody waits for an answer."""
        front_end = self._front_ends.get(index)
        if front_end is None or not front_end.present:
            logger.warning("%s dropped: front end %d is not there", what, index)
            return None
        return front_end

    # -- utilities -------------------------------------------------------------------------------

    def _call_utility(self, call: UtilityCall) -> UtilityResult:
        utility = _UTILITIES.get(call.name)
        if utility is None:
            known = ", ".join(sorted(_UTILITIES))
            error = f"engines have no utility {call.name!r}; they have {known}"
            return UtilityResult(call.call_id, self.rank, error=error)
        try:
            arguments = msgspec.convert(call.arguments, utility.arguments)
        except msgspec.ValidationError as invalid:
            error = f"wrong arguments for {call.name}: {invalid}"
            return UtilityResult(call.call_id, self.rank, error=error)
        return UtilityResult(call.call_id, self.rank, result=utility.run(self, arguments))

    def _reset_prefix_cache(self) -> dict[str, UtilityValue]:
        return {"blocks_forgotten": self._scheduler.reset_prefix_cache()}

    def _info(self) -> dict[str, UtilityValue]:
        executor = self._executor.info
        gauges = self._scheduler.gauges()
        return {
            "rank": self.rank,
            "incarnation": self.incarnation,
            "wave": self.wave,
            "step": self._step,
            "waiting": gauges.waiting,
            "running": gauges.running,
            "kv_usage": gauges.kv_usage,
            "num_kv_blocks": executor.num_kv_blocks,
            "block_size": self._block_size,
            "max_model_len": self._scheduler.max_model_len,
            "vocab_size": executor.vocab_size,
            "model_fingerprint": executor.model_fingerprint,
        }


class _NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Utility(NamedTuple):
    """What a front end may call: the type of its arguments and the call."""

    arguments: type[msgspec.Struct]
    run: Callable[[EngineCore, Any], dict[str, UtilityValue]]


_UTILITIES = {
    "reset_prefix_cache": _Utility(_NoArguments, lambda core, _: core._reset_prefix_cache()),
    "info": _Utility(_NoArguments, lambda core, _: core._info()),
}
