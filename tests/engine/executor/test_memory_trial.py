"""Memory left for the KV cache by the largest step, with a model on several processes.

On a CPU, the trial runs the same steps and commands as on CUDA, without a memory limit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.grid import Grid
from engine.distributed.group import Group
from engine.distributed.spec import GroupBroken
from engine.executor.in_process import InProcessExecutor
from engine.executor.kv_sizing import KvSizing
from engine.executor.team import Team
from engine.executor.team_messages import Allocate, BeginTrial, EndTrial, WorkerLaunch, WorkerReply
from engine.executor.worker import Worker
from engine.models.decoder import Decoder
from engine.models.moe import run_experts
from engine.models.parallel import experts
from engine.runner.kv_memory import bytes_per_block
from engine.runner.memory_profile import MemoryTrial, free_for_cache
from engine.shared.config import (
    EngineConfig,
)
from tests.engine.configs import config_of
from tests.engine.driver import BLOCK_SIZE, NUM_BLOCKS, Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel

TOKENS = 48
SHARES = [0.5, 0.25]
DEVICE_BYTES, PEAK_BYTES = 2**22, 2**18
"""Of a made-up device, and what the largest step takes of it."""


def settings(directory: Path, share: float = SHARES[0], **parallel: Any) -> EngineConfig:
    return config_of(
        directory,
        cache={"gpu_memory_utilization": share},
        scheduler={"max_num_batched_tokens": TOKENS},
        parallel={"data_parallel_size": 2} | parallel,
    )


@pytest.fixture
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make trials end as on a device with this much memory."""

    def left(_: MemoryTrial, peak: int, utilization: float) -> int:
        assert peak == PEAK_BYTES
        return free_for_cache(total=DEVICE_BYTES, utilization=utilization, peak=peak, others=0)

    monkeypatch.setattr(MemoryTrial, "peak", lambda *_: PEAK_BYTES)
    monkeypatch.setattr(MemoryTrial, "remaining", left)


def blocks_of(share: float, loaded: Decoder) -> int:
    """Return the number of blocks that fit into such a part of the simulated device."""
    block = bytes_per_block(loaded.spec, BLOCK_SIZE, loaded.kv_format)
    assert block < PEAK_BYTES
    return (int(DEVICE_BYTES * share) - PEAK_BYTES) // block


class Answers:
    """A leader whose workers answer with these block counts."""

    def __init__(self, *blocks: int) -> None:
        self.team = self
        self._blocks = blocks

    def collect(self) -> list[WorkerReply]:
        return [WorkerReply(count) for count in self._blocks]


@pytest.mark.parametrize(
    ("own", "others", "agreed"), [(9, (5, 7), 5), (4, (5, 7), 4), (9, (0,), 0)]
)
def test_all_processes_get_block_count_of_smallest_memory(
    own: int, others: tuple[int, ...], agreed: int
) -> None:
    leader: Any = Answers(*others)
    sizing = KvSizing(EngineConfig(), torch.device("cpu"), 2, leader)
    assert sizing._minimum_over_workers(own) == agreed


def test_processes_that_hold_a_model_together_try_the_largest_step_together(
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    request: pytest.FixtureRequest,
) -> None:
    model = checkpoint("llama")
    config = settings(model.directory, tensor_parallel_size=2, data_parallel_size=1)
    team = Team(config, 0, 1)
    executor = InProcessExecutor(config, team=team)
    try:
        served, device = executor._loaded.model, executor._device
        assert served is not None
        assert executor._leader is not None
        sizing = KvSizing(config, device, 2, executor._leader)
        blocks = sizing.blocks_after_trial(served, executor.info.max_model_len)
        assert blocks > 0
        request.getfixturevalue("made_up_device")  # the other process has all the free memory
        share = sizing.blocks_after_trial(served, executor.info.max_model_len)
        assert share == blocks_of(SHARES[0], served)
        executor._leader.call(Allocate(NUM_BLOCKS, executor.info.model_fingerprint))
        cut, whole = Driver(executor), driver(model.directory)
        for engine in (cut, whole):
            engine.start(0, prompt(30))
            engine.prefill(0)
            engine.decode(10, 0)
        assert cut.tokens == whole.tokens
    finally:
        executor.shutdown()


@pytest.mark.usefixtures("made_up_device")
def test_memory_utilization_holds_with_spread_experts(checkpoint: SaveModel) -> None:
    model = checkpoint("qwen3-moe")
    for share in SHARES:
        config = settings(model.directory, share, data_parallel_size=2, enable_expert_parallel=True)
        executor = InProcessExecutor(config, rank=1)
        loaded = executor._loaded.model
        assert loaded is not None
        blocks = KvSizing(config, executor._device, 1).blocks_after_trial(
            loaded, executor.info.max_model_len
        )
        assert blocks == blocks_of(share, loaded)
        executor.shutdown()


@pytest.mark.usefixtures("made_up_device")
def test_memory_utilization_holds_for_every_process(checkpoint: SaveModel) -> None:
    model = checkpoint("llama")
    for share in SHARES:
        config = settings(model.directory, share, pipeline_parallel_size=2)
        launch = WorkerLaunch(config, 0, 0, 2, "", engines_on_node=1)
        worker = Worker(launch, Grid(Group.single(), None, None), torch.device("cpu"))
        assert worker.execute(BeginTrial(NUM_BLOCKS))
        assert worker.execute(EndTrial())
        assert worker.free_blocks == blocks_of(share, worker._loaded)


def test_expert_parallel_memory_trial_uses_step_filled_by_all_engines(
    checkpoint: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("qwen3-moe")
    config = settings(model.directory, data_parallel_size=2, enable_expert_parallel=True)
    executor = InProcessExecutor(config, rank=1)
    loaded = executor._loaded.model
    assert loaded is not None
    assert loaded.expert_group is not None
    rows: list[int] = []

    def watched(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(x))
        return run_experts(x, *arguments)

    monkeypatch.setattr(experts, "run_experts", watched)
    sizing = KvSizing(config, executor._device, 1)
    assert sizing.blocks_after_trial(loaded, executor.info.max_model_len) > 0
    assert rows == [2 * TOKENS] * len(loaded.sparse_layers), "tokens of both engines"
    with pytest.raises(GroupBroken):
        _ = loaded.expert_group.group
    executor.shutdown()
