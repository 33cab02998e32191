"""All settings of one engine."""

import msgspec

from engine.shared.config.cluster import ClusterConfig, ParallelConfig
from engine.shared.config.execution import ExecutorConfig, SchedulerConfig
from engine.shared.config.lora import LoraConfig
from engine.shared.config.model import CacheConfig, ModelConfig
from engine.shared.config.process import HealthConfig, LogConfig
from engine.shared.config.section import Section


class EngineConfig(Section, frozen=True, kw_only=True):
    """All that one engine needs to know."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()


class EngineLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an engine process at its start."""

    config: EngineConfig
    incarnation: int
    """Random number of this process, chosen by the supervisor so that it can report its death."""
