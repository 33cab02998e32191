"""A process that is one engine of an expert-parallel group, told what to do line by line."""

import json
import sys
from typing import Any

import torch

from engine.distributed.group import Group, join_group
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.in_process import InProcessExecutor
from engine.models.parallel.experts import SendingRule, SpreadExperts
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver


class Member:
    """What can be asked of it; answers are JSON too."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.failed: BatchPlan | None = None

    def load(self, directory: str, position: int, size: int) -> None:
        self.executor = InProcessExecutor(
            EngineConfig(
                model=ModelConfig(model=directory, device="cpu"),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS),
                scheduler=SchedulerConfig(max_num_seqs=8),
                executor=ExecutorConfig(threads=1),
                parallel=ParallelConfig(data_parallel_size=size, enable_expert_parallel=True),
            ),
            rank=position,
        )
        self.driver = Driver(self)

    def run(self, plan: BatchPlan) -> BatchResult:
        """Run a step as an engine would; a plan that fails is kept, to be run again."""
        self.failed = plan
        result = self.executor.submit(plan).result()
        self.failed = None
        return result

    def prepare(self, position: int, size: int) -> list[list[int]]:
        if self.group is not None:
            self.group.close()
        self.executor.prepare_group(position, size)
        return self.shares()

    def shares(self) -> list[list[int]]:
        model = self.executor._model
        assert model is not None
        experts = [mlp.experts for mlp in model.sparse_layers.values()]
        return [list(e.share) for e in experts if isinstance(e, SpreadExperts)]

    def join(self, address: str, rank: int, size: int, topology: int, timeout: float) -> None:
        self.group = join_group(GroupSpec(address, rank, size, topology, timeout))
        self.executor.join_group(self.group)

    def retry(self) -> None:
        """Run the step again that failed with the group before."""
        assert self.failed is not None
        self.driver.take(self.failed, self.run(self.failed))

    def start(self, slot: int, tokens: list[int]) -> None:
        self.driver.start(slot, tokens)

    def steps(self, count: int, *slots: int) -> None:
        """Compute whatever the slots have left, then one token each; nothing without slots."""
        for _ in range(count):
            self.driver.step({s: self._left(s) for s in slots})

    def _left(self, slot: int) -> int:
        return len(self.driver.tokens[slot]) - self.driver.computed[slot]

    def tokens(self, slot: int) -> list[int]:
        return self.driver.tokens[slot]

    def always_send(self, on: bool) -> None:
        """Never send all tokens to all ranks, or do as usual."""
        group = self.executor._model.expert_group if self.executor._model else None
        assert group is not None
        group.rule = SendingRule(0, 2.0) if on else SendingRule()

    def sleep_and_wake(self) -> None:
        self.executor.sleep(2)
        self.executor.wake_up()


def main() -> None:
    torch.set_num_threads(1)
    member = Member()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"ok": getattr(member, name)(*arguments)}
        except GroupBroken as error:
            answer = {"broken": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
