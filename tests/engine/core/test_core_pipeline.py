"""Pipelined steps: several in flight, and no sequence in two unless its token is known."""

from typing import Any

import pytest

from engine.batch.batch import BatchPlan
from engine.core.engine_core import EngineCore
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tests.engine.core.traffic import request, serve
from tests.support.checked_executor import CheckedExecutor


class WatchedExecutor(CheckedExecutor):
    """Checks which steps contain each slot, and records the rows of all steps."""

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(
            settings,
            vocab_size=40,
            eos_token_ids=(0,),
        )
        self.rows: list[int] = []

    def submit(self, plan: BatchPlan) -> Any:
        self.rows.append(len(plan.slots))
        return super().submit(plan)


def engine(
    stages: int,
    *,
    overlap: bool = False,
    drafts: int = 0,
    blocks: int = 24,
    seqs: int = 4,
    whole: bool = False,
) -> tuple[EngineCore, WatchedExecutor]:
    settings = EngineConfig(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(block_size=4, num_kv_blocks=blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=16 if seqs < 32 and not whole else 2048,
            enable_chunked_prefill=not whole,
            async_scheduling=overlap,
            speculative_ngram=drafts,
        ),
        executor=ExecutorConfig(simulated_step_us=2000, simulated_token_us=10),
        parallel=ParallelConfig(pipeline_parallel_size=stages),
    )
    executor = WatchedExecutor(settings)
    core = EngineCore(settings, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    return core, executor


@pytest.mark.parametrize(("stages", "overlap"), [(2, False), (2, True), (4, True)])
def test_every_stage_is_busy_while_enough_sequences_decode(stages: int, overlap: bool) -> None:
    core, executor = engine(stages, overlap=overlap, blocks=2048, seqs=32)
    for id in range(32):
        core.handle(request(id, 10, 50))
    for _ in range(3 * stages):
        core.step()
    busy, started_at = list(executor.times.busy), executor.times.now()
    steps = len(executor.rows)
    while core.stats().running == 32:
        core.step()
    elapsed = executor.times.now() - started_at
    shares = [
        (now - before) / elapsed for now, before in zip(executor.times.busy, busy, strict=True)
    ]
    assert min(shares) >= 0.85
    assert set(executor.rows[steps:-stages]) == {32 // stages}, "all have their share of sequences"


def test_sequence_is_in_two_steps_only_if_its_token_is_sampled_in_time() -> None:
    core, executor = engine(3)
    core.handle(request(1, 5, 4))
    while core.has_work:
        core.step()
    assert executor.rows == [1] * 4
    assert executor.times.now() == pytest.approx(sum(executor.times.busy))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("stages", "overlap", "drafts", "whole"),
    [
        (2, False, 0, False), (2, True, 0, False), (3, False, 3, False), (3, True, 0, False),
        (4, True, 3, False), (2, True, 0, True), (3, False, 3, True),
    ],
)  # fmt: skip
def test_a_full_pipeline_changes_no_token_and_no_end(
    stages: int, overlap: bool, drafts: int, seed: int, whole: bool
) -> None:
    alone = serve(engine(1)[0], seed, 40)
    together = serve(engine(stages, overlap=overlap, drafts=drafts, whole=whole)[0], seed, 40)
    assert alone[:2] == together[:2]
    assert together[2] > 0, "nobody was preempted"
