"""The configuration of an engine with a real model, as small as tests need it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)


def config_of(directory: Path, **sections: Mapping[str, Any]) -> EngineConfig:
    """Return the config of one engine that computes in float32 with one thread of the CPU.

    It has 400 KV blocks of 8 tokens, for at most 8 sequences. Values are replaced by section:
    `cache={"num_kv_blocks": 30}`.
    """
    config = EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32"),
        cache=CacheConfig(block_size=8, num_kv_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=8),
        executor=ExecutorConfig(threads=1),
        parallel=ParallelConfig(data_parallel_size=1),
    )
    return config.changed(**sections)
