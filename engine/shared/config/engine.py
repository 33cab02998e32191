"""All settings of one engine; logging and the health port are those of every process."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.shared.config.cluster import ClusterConfig, ParallelConfig
from engine.shared.config.execution import ExecutorConfig, SchedulerConfig
from engine.shared.config.lora import LoraConfig
from engine.shared.config.model import CacheConfig, ModelConfig
from engine.shared.config.section import PositiveFloat, Section


class HealthConfig(Section, frozen=True, kw_only=True):
    """Health"""

    health_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        "Port on which an engine or a coordinator answers GET /health and /ready, on all "
        "interfaces; default: none. Under `swell serve` the first engine of the node has this port "
        "and the others the next ones.",
    ] = None
    stall_timeout: Annotated[
        PositiveFloat,
        "Seconds without progress of the main loop after which the process counts as unhealthy; "
        "an engine's steps may take longer, as --step-timeout says.",
    ] = 60.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Logging"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], "Lowest level of log lines that is shown."
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], "text: lines for people; json: one JSON object per line."
    ] = "text"


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
