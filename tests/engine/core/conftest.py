"""A core with a checking simulated executor and two front ends."""

import pytest

from engine.core.engine_core import EngineCore
from engine.core.front_ends import CoreStep
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.shared.messages import AddRequest, SamplingParams
from tests.support.checked_executor import CheckedExecutor

CONFIG = EngineConfig(
    model=ModelConfig(max_model_len=64),
    cache=CacheConfig(block_size=4, num_kv_blocks=32),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
)


@pytest.fixture
def core() -> EngineCore:
    executor = CheckedExecutor(CONFIG)
    core = EngineCore(CONFIG, executor, rank=2, incarnation=77)
    core.front_end_joined(0, 100)
    core.front_end_joined(1, 101)
    return core


def request(id: int, front_end: int = 0, *, length: int = 5, max_tokens: int = 3) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=id)
    return AddRequest(id, f"request-{id}", front_end, 0, list(range(length)), sampling)


def run(core: EngineCore) -> list[CoreStep]:
    steps = []
    while core.has_work:
        steps.append(core.step())
    return steps
