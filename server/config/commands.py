"""All settings of `swell serve`, of `swell api-server` and of one front end."""

from typing import Any, TypeVar

import msgspec

from coordinator.config import CoordinatorConfig, PublishConfig
from engine.shared.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ExecutorConfig,
    HealthConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Section,
)
from server.config.answer import AnswerConfig
from server.config.fleet import NodesConfig, RayConfig, SupervisorConfig
from server.config.http import GuardConfig, HttpConfig
from server.config.load import OverloadConfig, RoutingConfig, TenantConfig
from server.config.media import MediaConfig
from server.config.store import StoreConfig

C = TypeVar("C", bound=Section)

_CUDA: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 64}


def _part(config: Section, kind: type[C]) -> C:
    return kind(**{name: getattr(config, name) for name in kind.__struct_fields__})


class FrontEndConfig(Section, frozen=True, kw_only=True):
    """All settings of one front end."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = HttpConfig()
    guards: GuardConfig = GuardConfig()
    overload: OverloadConfig = OverloadConfig()
    tenants: TenantConfig = TenantConfig()
    answer: AnswerConfig = AnswerConfig()
    media: MediaConfig = MediaConfig()
    store: StoreConfig = StoreConfig()
    routing: RoutingConfig = RoutingConfig()
    log: LogConfig = LogConfig()

    @property
    def allows_priority(self) -> bool:
        """Whether clients can send priorities."""
        allowed = self.tenants.allow_priority
        return not self.guards.has_keys if allowed is None else allowed

    @property
    def allows_rank_pinning(self) -> bool:
        """Whether clients can choose engines."""
        allowed = self.tenants.allow_rank_pinning
        return not self.guards.has_keys if allowed is None else allowed


class ApiServerConfig(FrontEndConfig, frozen=True, kw_only=True):
    """All settings of `swell api-server`: the front ends of one node."""

    supervisor: SupervisorConfig = SupervisorConfig()

    def front_end(self) -> FrontEndConfig:
        """Return the settings of each front end."""
        return _part(self, FrontEndConfig)

    def node(self) -> "ServeConfig":
        """Return the settings of a node that runs these front ends and no engine."""
        parallel = msgspec.structs.replace(self.parallel, data_parallel_size_local=0)
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return ServeConfig(**{**fields, "parallel": parallel})


class ServeConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell serve`: every process of one node."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    nodes: NodesConfig = NodesConfig()
    ray: RayConfig = RayConfig()
    http: HttpConfig = HttpConfig()
    guards: GuardConfig = GuardConfig()
    overload: OverloadConfig = OverloadConfig()
    tenants: TenantConfig = TenantConfig()
    answer: AnswerConfig = AnswerConfig()
    media: MediaConfig = MediaConfig()
    store: StoreConfig = StoreConfig()
    routing: RoutingConfig = RoutingConfig()
    publish: PublishConfig = PublishConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.tenants.allow_priority and self.scheduler.scheduling_policy == "fcfs":
            raise ValueError("allow_priority needs the scheduling_policy priority")

    def engine(self) -> EngineConfig:
        """Return the settings of engines."""
        return _part(self, EngineConfig)

    def coordinator(self) -> CoordinatorConfig:
        """Return the settings of the coordinator, without the node's health port, which engines
        use."""
        return CoordinatorConfig(cluster=self.cluster, publish=self.publish, log=self.log)

    def front_end(self) -> FrontEndConfig:
        """Return the settings of front ends."""
        return msgspec.structs.replace(_part(self, FrontEndConfig), tenants=self._tenants())

    def _tenants(self) -> TenantConfig:
        if self.tenants.allow_priority is None and self.scheduler.scheduling_policy == "fcfs":
            return msgspec.structs.replace(self.tenants, allow_priority=False)
        return self.tenants


def defaults_for(config: ServeConfig | EngineConfig, num_devices: int) -> dict[str, Any]:
    """Return the defaults that differ from those for CPUs, by setting name.

    Args:
        config: the configured values, and other settings' defaults.
        num_devices: CUDA devices visible to engines on this node.
    """
    on_cpu = config.model.device == "cpu" or config.executor.executor == "simulated"
    found = {} if on_cpu or not num_devices else dict(_CUDA)
    longest = config.model.max_model_len
    if longest is not None and not config.scheduler.enable_chunked_prefill:
        usual = SchedulerConfig().max_num_batched_tokens
        found["max_num_batched_tokens"] = max(longest, found.get("max_num_batched_tokens", usual))
    if on_cpu or not num_devices:
        return found
    parallel = config.parallel
    is_one_node = (
        isinstance(config, ServeConfig)
        and config.nodes.data_parallel_address is None
        and config.ray.data_parallel_backend == "mp"
        and parallel.nnodes == 1
        and parallel.data_parallel_size_local is None
        and parallel.data_parallel_rank is None
    )
    if is_one_node:
        found["data_parallel_size"] = max(1, num_devices // parallel.processes)
    return found
