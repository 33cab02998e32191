"""One engine in virtual time: the production scheduler and what its steps cost."""

from typing import NamedTuple

from benchmarks.simulation.costs import CostModel, StepCost
from benchmarks.simulation.workload import RequestSpec
from engine.executor.interface import ExecutorInfo
from engine.scheduler.admission import UNLIMITED, Grant, RankState
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.scheduler.outputs import Outputs
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.messages import AddRequest, SamplingParams


class EngineShape(NamedTuple):
    """The limits of one engine. Prefix caching is off: simulated prompts have nothing in common."""

    scheduler: SchedulerConfig
    num_kv_blocks: int
    block_size: int = 256
    max_model_len: int = 65_536


def message(id: int, spec: RequestSpec, front_end: int) -> AddRequest:
    """Return the request that a front end would send."""
    sampling = SamplingParams(max_tokens=spec.output_tokens, seed=0, ignore_eos=True)
    return AddRequest(id, "", front_end, 0, [0] * spec.prompt_tokens, sampling)


class Replica:
    """An engine between two of its steps, or in one."""

    def __init__(self, shape: EngineShape, costs: CostModel) -> None:
        info = ExecutorInfo(shape.num_kv_blocks, shape.max_model_len, 1, (), "simulated")
        cache = CacheConfig(block_size=shape.block_size, enable_prefix_caching=False)
        self.scheduler = Scheduler(shape.scheduler, cache, info)
        self.inbox: list[AddRequest] = []
        self.prefill_tokens = 0
        """Of the step that runs or ran last."""
        self._costs = costs
        self._plan: BatchPlan | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.inbox) or self.scheduler.has_work

    def drain(self) -> None:
        """Take what has arrived.

        Raises:
            ValueError: a request can never be served by this engine.
        """
        for request in self.inbox:
            answer = self.scheduler.add(request)
            if answer is not None:
                raise ValueError(f"request {request.id}: {answer.error or answer.finish_reason}")
        self.inbox.clear()

    def state(self, last_step_us: int) -> RankState:
        """Return what this rank tells the others."""
        return self.scheduler.rank_state(last_step_us, self.prefill_tokens)

    def begin(self, grant: Grant = UNLIMITED) -> StepCost:
        """Start a step and return its cost."""
        self._plan = self.scheduler.schedule(grant)
        cost = self._costs.of(self._plan)
        self.prefill_tokens = cost.prefill_tokens
        return cost

    def finish(self) -> Outputs:
        """End the step that was begun and return its tokens."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        return self.scheduler.update(plan, BatchResult([0] * sum(plan.samples)))

    @property
    def dummy(self) -> bool:
        """Whether the step that runs computes nothing."""
        return self._plan is not None and not self._plan.slots
