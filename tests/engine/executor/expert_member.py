"""A process that is one engine of an expert-parallel group, with one command per line.

With the argument `device`, it computes on a simulated device (`strict_device`).
"""

import sys
from typing import Any, Literal

import msgspec
import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.distributed.engines import EngineGroup
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor import worker_process
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team, WorkerFailed
from engine.models.decoder import Decoder
from engine.models.parallel.experts import DistributedExperts, SendingRule
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tests.engine.distributed import strict_device
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver
from tests.engine.executor.many_kinds import requests, serve
from tests.engine.processes import answer_lines


class Member:
    """The commands; results are JSON."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self.device = device
        self.group: EngineGroup | None = None
        self.failed: BatchPlan | None = None
        self.team: Team | None = None

    def load(
        self,
        directory: str,
        position: int,
        size: int,
        shards: int = 1,
        num_blocks: int | None = NUM_BLOCKS,
        balance: tuple[int, int] | None = None,
        stages: int = 1,
        overlap: bool = False,
        method: Literal["auto", "mtp"] = "auto",
    ) -> None:
        if self.team is not None:
            self.executor.shutdown()
            self.team = None
        self.config = EngineConfig(
            model=ModelConfig(
                model=directory, device=self.device, dtype="float32", max_model_len=160
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=40,
                async_scheduling=overlap,
                speculative_method=method,
            ),
            executor=ExecutorConfig(threads=1, enforce_eager=True),
            parallel=ParallelConfig(
                data_parallel_size=size,
                tensor_parallel_size=shards,
                pipeline_parallel_size=stages,
                enable_expert_parallel=stages == 1,
                enable_eplb=balance is not None,
                num_redundant_experts=0 if balance is None else balance[0],
                eplb_step_interval=1 if balance is None else balance[1],
            ),
        )
        self.executor: InProcessExecutor
        if shards * stages == 1:
            self.executor = InProcessExecutor(self.config, position)
        else:
            self.team = Team(self.config, position, 1)
            self.executor = InProcessExecutor(self.config, position, team=self.team)
        self.driver = Driver(self)

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return [] if self.team is None else self.team.pids

    def run(self, plan: BatchPlan) -> BatchResult:
        """Run a step like an engine; a failed plan is kept for a retry."""
        self.failed = plan
        result = self.executor.submit(plan).result()
        self.failed = None
        return result

    def prepare(self, position: int, size: int) -> list[list[int]]:
        if self.group is not None:
            self.group.close()
        self.executor.prepare_group(position, size)
        return self.shares()

    def serve(self, first: int, scheduling: dict[str, Any], engines: int = 2) -> list[Any]:
        """Serve every second of the requests of all kinds, in steps with the others' engines."""
        scheduler = msgspec.structs.replace(self.config.scheduler, **scheduling)
        config = msgspec.structs.replace(self.config, scheduler=scheduler)
        vocab = self.executor.info.vocab_size
        grammars = self.executor.grammars is not None
        made = requests(vocab, grammars=grammars)[first::engines]
        served, counters = serve(self.executor, config, made, self.group)
        return [
            *([sorted(each.items()) for each in served]),
            counters.preemptions,
            counters.prefix_cache_hits,
            counters.spec_accepted_tokens,
        ]

    def shares(self) -> list[list[int]]:
        model = self._model
        experts = [mlp.experts for mlp in model.sparse_layers.values()]
        return [list(e.share) for e in experts if isinstance(e, DistributedExperts)]

    def balance(self) -> tuple[float | None, int]:
        """Return the measured expert load, and how often layers were rebalanced."""
        found = self.executor.expert_balance
        assert found is not None
        return found.imbalance, found.moved_layers

    def join(self, address: str, rank: int, size: int, topology: int, timeout: float) -> None:
        spec = GroupSpec(address, rank, size, topology, timeout)
        self.group = self.executor.join_group(spec, None)

    def retry(self) -> None:
        """Retry the step that failed with the previous group."""
        assert self.failed is not None
        self.driver.take(self.failed, self.run(self.failed))

    def start(self, slot: int, tokens: list[int]) -> None:
        self.driver.start(slot, tokens)

    def steps(self, count: int, *slots: int) -> None:
        """Compute the slots' remaining tokens, then one token each; nothing without slots."""
        for _ in range(count):
            self.driver.step({s: self._left(s) for s in slots})

    def _left(self, slot: int) -> int:
        return len(self.driver.tokens[slot]) - self.driver.computed[slot]

    def tokens(self, slot: int) -> list[int]:
        return self.driver.tokens[slot]

    def always_send(self, on: bool) -> None:
        """Never send all tokens to all ranks, or do as usual."""
        group = self._model.expert_group
        assert group is not None
        group.rule = SendingRule(0, 2.0) if on else SendingRule()

    @property
    def _model(self) -> Decoder:
        return self.executor._loaded.model

    def on_device(self) -> bool:
        """Return whether its KV cache is on the simulated device."""
        runner = self.executor._runner
        assert runner is not None
        return all(isinstance(layer, strict_device.OnDevice) for layer in runner._cache)

    def sleep_and_wake(self) -> None:
        for level in (1, 2, 1):
            self.executor.sleep(level)
            if level == 1 and self.device == "cuda":
                assert self.executor._holder._offloaded is not None
            self.executor.wake_up()


def main() -> None:
    torch.set_num_threads(1)
    device: Literal["cpu", "cuda"] = "cpu"
    if sys.argv[1:] == ["device"]:
        device = "cuda"
        strict_device.install()
        worker_process.WORKER_MODULE = "tests.engine.executor.strict_worker"
    answer_lines(Member(device), {GroupBroken: "broken", WorkerFailed: "failed"})


if __name__ == "__main__":
    main()
