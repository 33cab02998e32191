"""Settings of the coordinator; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from engine.shared.config import ClusterConfig, HealthConfig, LogConfig, PositiveFloat, Section


class PublishConfig(Section, frozen=True, kw_only=True):
    """Publishing"""

    publish_interval: Annotated[
        PositiveFloat, "Minimum seconds between two messages of the coordinator with changed load."
    ] = 0.1
    publish_idle_interval: Annotated[
        PositiveFloat, "Seconds between the coordinator's messages while nothing changes."
    ] = 3.0


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    """All that the coordinator needs to know."""

    cluster: ClusterConfig = ClusterConfig()
    publish: PublishConfig = PublishConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()
