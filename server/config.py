"""Settings of the front ends and of the supervisor; see `engine.config` for the conventions."""

from typing import Annotated

from msgspec import Meta

from coordinator.config import CoordinatorConfig, PublishConfig
from engine.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ExecutorConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Section,
)


class HttpConfig(Section, frozen=True, kw_only=True):
    """HTTP"""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8000
    max_logprobs: Annotated[
        int, Meta(ge=0, description="Most alternatives that a request may ask for per token.")
    ] = 20
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that requests in flight get to end after SIGTERM."),
    ] = 2.0
    metrics_prefix: Annotated[
        str, Meta(description="Prefix of all metric names, e.g. `vllm:` for existing dashboards.")
    ] = "swell_"


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Routing"""

    max_resumes: Annotated[
        int,
        Meta(ge=0, description="How often a request may be moved away from an engine that died."),
    ] = 1
    resume_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds that a moved request waits for an engine to take it over."),
    ] = 30.0


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """Processes"""

    api_server_count: Annotated[
        int, Meta(ge=1, le=256, description="Number of API-server processes on this node.")
    ] = 2
    startup_timeout: Annotated[
        float, Meta(gt=0, description="Seconds until every process has to be ready.")
    ] = 600.0


class FrontEndConfig(Section, frozen=True, kw_only=True):
    """All that one front end needs to know."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = HttpConfig()
    routing: RoutingConfig = RoutingConfig()
    log: LogConfig = LogConfig()


class ServeConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell serve`: every process of one node."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = HttpConfig()
    routing: RoutingConfig = RoutingConfig()
    publish: PublishConfig = PublishConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    log: LogConfig = LogConfig()

    def engine(self) -> EngineConfig:
        """Return the part that engines get."""
        return EngineConfig(
            model=self.model,
            cache=self.cache,
            scheduler=self.scheduler,
            executor=self.executor,
            parallel=self.parallel,
            cluster=self.cluster,
            log=self.log,
        )

    def coordinator(self) -> CoordinatorConfig:
        """Return the part that the coordinator gets."""
        return CoordinatorConfig(cluster=self.cluster, publish=self.publish, log=self.log)

    def front_end(self) -> FrontEndConfig:
        """Return the part that front ends get."""
        return FrontEndConfig(
            model=self.model,
            parallel=self.parallel,
            cluster=self.cluster,
            http=self.http,
            routing=self.routing,
            log=self.log,
        )
