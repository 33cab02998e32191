"""Settings of the front ends and the supervisor; conventions: `engine.shared.config`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from coordinator.config import CoordinatorConfig, PublishConfig
from engine.shared.config import (
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
from server.answer.config import AnswerConfig


class HttpConfig(Section, frozen=True, kw_only=True):
    """HTTP"""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8000
    max_logprobs: Annotated[
        int,
        Meta(
            ge=-1,
            description="Maximum alternatives that a request may ask for per token; -1: all of the "
            "vocabulary.",
        ),
    ] = 20
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/?#]+)*/?$",
            description="Prefix of all paths behind a proxy, e.g. `/swell`, whether or not the "
            "proxy takes it off.",
        ),
    ] = ""
    enable_force_include_usage: Annotated[
        bool, Meta(description="End every stream with its usage, asked for or not.")
    ] = False
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that requests in flight get to end after SIGTERM."),
    ] = 2.0
    access_log: Annotated[bool, Meta(description="Log a line per HTTP answer.")] = False
    log_stats_interval: Annotated[
        float,
        Meta(ge=0, description="Seconds between log lines on what each busy engine does; 0: none."),
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP URL to which a span per request is sent, e.g. "
            "`http://collector:4318/v1/traces` (needs `swell[otel]`); default: no traces."
        ),
    ] = None
    metrics_prefix: Annotated[
        str, Meta(description="Prefix of all metric names, e.g. `vllm:` for existing dashboards.")
    ] = "swell_"


class GuardConfig(Section, frozen=True, kw_only=True):
    """Access and limits"""

    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Key(s) of which clients must send one, but to /health, /ping, "
            "/ready and /version; default: none needed."
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File with such keys in addition, one per line: KEY, or NAME: KEY. Keys of "
            "one name are one tenant."
        ),
    ] = None
    admin_key: Annotated[
        str | None, Meta(description="Key for /admin/*; without one there is no /admin.")
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="File with the key for /admin/*, instead.")
    ] = None
    metrics_key: Annotated[
        str | None,
        Meta(description="Key that opens /metrics and nothing else, for what scrapes it."),
    ] = None
    metrics_key_file: Annotated[
        str | None, Meta(description="File with the key for /metrics, instead.")
    ] = None
    open_status: Annotated[
        bool | None,
        Meta(
            description="Whether the status page and /status.json, which show hosts and load, "
            "need no key; default: only where there is no API key."
        ),
    ] = None
    open_docs: Annotated[bool | None, Meta(description="The same for /docs and /openapi.json.")] = (
        None
    )
    open_metrics: Annotated[bool | None, Meta(description="The same for /metrics.")] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="Web origins whose pages may call the API (CORS); * allows all."),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Meta(description="HTTP methods that such pages may use.")
    ] = ("GET", "POST")
    allowed_headers: Annotated[
        tuple[str, ...], Meta(description="Request headers that such pages may send.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="Whether browsers may send cookies and the like along.")
    ] = False
    ssl_certfile: Annotated[
        str | None, Meta(description="Certificate chain (PEM); serves HTTPS instead of HTTP.")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="Private key of the certificate; default: in the same file.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(description="Certificates of the authorities that clients must have theirs from."),
    ] = None
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="Largest request body; the default holds the text of 500,000 tokens or "
            "the ids of 250,000.",
        ),
    ] = 4 * 2**20
    max_body_bytes_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum bytes of unfinished request bodies that this node holds; what "
            "does not fit is answered with 503.",
        ),
    ] = 128 * 2**20
    max_header_bytes: Annotated[
        int, Meta(ge=1024, description="Largest head of a request, and largest trailers.")
    ] = 16 * 2**10
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum connections per API-server process, as far as descriptors allow; "
            "beyond it the longest idle one of whoever has most gives way, else 503.",
        ),
    ] = 8192
    receive_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds that a client may take to send a request's head or body."),
    ] = 60.0
    keep_alive_timeout: Annotated[
        int, Meta(ge=1, description="Seconds for which an idle connection is kept for reuse.")
    ] = 75
    send_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds after which a client that does not read is cut off."),
    ] = 60.0
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Seconds that a request may take in all; default: no limit."),
    ] = None

    @property
    def has_keys(self) -> bool:
        """Whether clients of the API need a key."""
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.ssl_certfile is None else "https"

    def __repr__(self) -> str:
        return "GuardConfig(...)"  # holds secrets

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class OverloadConfig(Section, frozen=True, kw_only=True):
    """Overload"""

    max_queue: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum sequences that wait on this node beyond those that the engines "
            "can run; more are answered with 429.",
        ),
    ] = 2048
    max_queue_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum prompt tokens that wait on this node to be computed; more are "
            "answered with 429; default: no limit."
        ),
    ] = None


class TenantConfig(Section, frozen=True, kw_only=True):
    """Tenants"""

    tenant_by: Annotated[
        Literal["key", "user"],
        Meta(
            description="Who shares the server fairly and is limited: key = each API key (keys of "
            "one name are one); user = each value of the field user as well, for servers behind a "
            "gateway that fills it in: whoever may name users can be many."
        ),
    ] = "key"
    max_sequences_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum sequences of one key (or user, see --tenant-by) on this node at "
            "once; more are answered with 429; default: as many as are left free to others."
        ),
    ] = None
    max_queue_tokens_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum prompt tokens of one key (or user) that wait on this node to be "
            "computed; more are answered with 429; default: with --max-queue-tokens as many as "
            "are left free to others, else no limit."
        ),
    ] = None
    prefix_cache_isolation: Annotated[
        Literal["none", "tenant"],
        Meta(
            description="Who finds whose prompts in the prefix cache: none = everybody "
            "everybody's with the same cache_salt; tenant = each key (or user) only its own."
        ),
    ] = "none"
    hide_cached_tokens: Annotated[
        bool, Meta(description="Do not tell clients how much of a prompt was in the prefix cache.")
    ] = False
    allow_priority: Annotated[
        bool | None,
        Meta(
            description="Whether clients may send a priority; default: if there are no API keys "
            "and this node's --scheduling-policy is not fcfs."
        ),
    ] = None
    allow_rank_pinning: Annotated[
        bool | None,
        Meta(
            description="Whether clients may choose an engine with the header "
            "X-data-parallel-rank; default: if there are no API keys."
        ),
    ] = None


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Routing"""

    routing_policy: Annotated[
        Literal["least-loaded", "prefix-affinity", "power-of-two", "round-robin"],
        Meta(
            description="Which engine gets a request: the one with the least work; the one that "
            "got a prompt that begins alike, while it is not much busier; the less loaded of two "
            "drawn at random; one after the other."
        ),
    ] = "least-loaded"
    max_resumes: Annotated[
        int,
        Meta(
            ge=0,
            description="How often a request may be moved away from an engine that died before it "
            "has to run alone.",
        ),
    ] = 1
    resume_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds that a moved request waits for an engine to take it over."),
    ] = 30.0


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """Processes"""

    api_server_count: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Number of API-server processes on this node; 0: only engines, for others.",
        ),
    ] = 2
    startup_timeout: Annotated[
        float, Meta(gt=0, description="Seconds until every process has to be ready.")
    ] = 600.0


class NodesConfig(Section, frozen=True, kw_only=True):
    """Several nodes"""

    data_parallel_address: Annotated[
        str | None,
        Meta(
            description="Address of the head node: `swell serve` hosts the coordinator there, for "
            "this node and for others; with --headless it is where to join."
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65532,
            description="Port of the head's coordinator, which takes the three after it too.",
        ),
    ] = 7550
    headless: Annotated[
        bool,
        Meta(description="Only engines here, for the front ends of the head that they join."),
    ] = False


class FrontEndConfig(Section, frozen=True, kw_only=True):
    """All that one front end needs to know."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = HttpConfig()
    guards: GuardConfig = GuardConfig()
    overload: OverloadConfig = OverloadConfig()
    tenants: TenantConfig = TenantConfig()
    answer: AnswerConfig = AnswerConfig()
    routing: RoutingConfig = RoutingConfig()
    log: LogConfig = LogConfig()

    @property
    def allows_priority(self) -> bool:
        """Whether clients may send priorities."""
        allowed = self.tenants.allow_priority
        return not self.guards.has_keys if allowed is None else allowed

    @property
    def allows_rank_pinning(self) -> bool:
        """Whether clients may choose engines."""
        allowed = self.tenants.allow_rank_pinning
        return not self.guards.has_keys if allowed is None else allowed


class ApiServerConfig(FrontEndConfig, frozen=True, kw_only=True):
    """All settings of `swell api-server`: the front ends of one node."""

    supervisor: SupervisorConfig = SupervisorConfig()

    def front_end(self) -> FrontEndConfig:
        """Return the part that each front end gets."""
        return FrontEndConfig(
            **{name: getattr(self, name) for name in FrontEndConfig.__struct_fields__}
        )

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
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = ClusterConfig()
    nodes: NodesConfig = NodesConfig()
    http: HttpConfig = HttpConfig()
    guards: GuardConfig = GuardConfig()
    overload: OverloadConfig = OverloadConfig()
    tenants: TenantConfig = TenantConfig()
    answer: AnswerConfig = AnswerConfig()
    routing: RoutingConfig = RoutingConfig()
    publish: PublishConfig = PublishConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.tenants.allow_priority and self.scheduler.scheduling_policy == "fcfs":
            raise ValueError("allow_priority needs the scheduling_policy priority")

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
            guards=self.guards,
            overload=self.overload,
            tenants=self._tenants(),
            answer=self.answer,
            routing=self.routing,
            log=self.log,
        )

    def _tenants(self) -> TenantConfig:
        """Return the settings of tenants with what follows from the engines' policy."""
        if self.tenants.allow_priority is None and self.scheduler.scheduling_policy == "fcfs":
            return msgspec.structs.replace(self.tenants, allow_priority=False)
        return self.tenants
