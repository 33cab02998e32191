"""All settings of one engine."""

import msgspec

from engine.shared.config.cluster import ClusterConfig, ParallelConfig
from engine.shared.config.execution import ExecutorConfig, SchedulerConfig
from engine.shared.config.lora import LoraConfig
from engine.shared.config.model import CacheConfig, ModelConfig
from engine.shared.config.process import HealthConfig, LogConfig
from engine.shared.config.section import Section


class EngineConfig(Section, frozen=True, kw_only=True):
    """All settings of one engine."""

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
    """Launch parameters that the supervisor sends to an engine process."""

    config: EngineConfig
    incarnation: int
    """Random id of this process, chosen by the supervisor so that it can report the death."""
