"""Settings of an engine and of the cluster that it joins, each defined once.

Names are those that users of vLLM know, where it has the setting.
"""

from engine.shared.config.cluster import DEFAULT_COORDINATOR, ClusterConfig, ParallelConfig
from engine.shared.config.engine import EngineConfig, EngineLaunch
from engine.shared.config.execution import ExecutorConfig, SchedulerConfig
from engine.shared.config.lora import MAX_NAME_SIZE, LoraConfig, LoraModule
from engine.shared.config.model import BUNDLED_MODEL, BUNDLED_MODEL_NAME, CacheConfig, ModelConfig
from engine.shared.config.process import HealthConfig, LogConfig
from engine.shared.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Section,
)

__all__ = [
    "BUNDLED_MODEL",
    "BUNDLED_MODEL_NAME",
    "DEFAULT_COORDINATOR",
    "MAX_NAME_SIZE",
    "CacheConfig",
    "ClusterConfig",
    "EngineConfig",
    "EngineLaunch",
    "ExecutorConfig",
    "HealthConfig",
    "LogConfig",
    "LoraConfig",
    "LoraModule",
    "ModelConfig",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OneOf",
    "ParallelConfig",
    "PositiveFloat",
    "PositiveInt",
    "SchedulerConfig",
    "Section",
]
