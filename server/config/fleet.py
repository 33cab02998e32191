"""Settings of a node's processes, and of several nodes."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.shared.config import PositiveFloat, PositiveInt, Section


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """Processes"""

    api_server_count: Annotated[
        int,
        Meta(ge=0, le=256),
        "Number of API-server processes on this node; 0: engines only.",
    ] = 2
    start_method: Annotated[
        Literal["fork", "exec"],
        "How engines and API servers are started; fork: fork from a preloaded process where "
        "possible (Linux, CPU, one process per engine); exec: start each from scratch, as later "
        "restarts always are.",
    ] = "fork"
    startup_timeout: Annotated[
        PositiveFloat, "Seconds within which every process must be ready."
    ] = 600.0
    hang_timeout: Annotated[
        PositiveFloat,
        "Seconds without progress of its main loop after which an API server or the coordinator is "
        "replaced; engines have --step-timeout.",
    ] = 30.0
    usage_report: Annotated[
        str | None,
        "File for a report of what this node serves, written at the start and at the end. Nothing "
        "is sent anywhere; default: none.",
    ] = None


class NodesConfig(Section, frozen=True, kw_only=True):
    """Several nodes"""

    data_parallel_address: Annotated[
        str | None,
        "Address of the head node, where `swell serve` runs the coordinator for all nodes; "
        "with --headless: the head to join.",
    ] = None
    data_parallel_rpc_port: Annotated[
        int,
        Meta(ge=1, le=65532),
        "First of the four consecutive ports of the head's coordinator.",
    ] = 7550
    headless: Annotated[bool, "Run engines only, for the front ends of the head node."] = False


class RayConfig(Section, frozen=True, kw_only=True):
    """Ray"""

    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        "Where engines run; mp: processes of this node; ray: actors on the nodes of a Ray cluster.",
    ] = "mp"
    api_server_placement: Annotated[
        Literal["head", "every-node"],
        "With Ray, where API servers run; head: --api-server-count of them where `swell serve` is "
        "started; every-node: also one on each other node that has engines, on that node's address "
        "and --port.",
    ] = "head"
    ray_address: Annotated[
        str | None,
        "HOST:PORT of the Ray cluster; default: RAY_ADDRESS, else the cluster that `ray start` "
        "started on this node, else a new one on this node only.",
    ] = None
    ray_dp_pack_strategy: Annotated[
        Literal["strict", "fill", "span"],
        "How ranks are spread over nodes; strict: --data-parallel-size-local (default: all) on "
        "each node, nodes with less room are skipped; fill: as many per node as fit, on this node "
        "--data-parallel-size-local if that is given; span: alias of fill.",
    ] = "strict"
    ray_wait_for_nodes: Annotated[
        bool, "At start, wait for nodes with room, e.g. from an autoscaler."
    ] = False
    ray_engine_resources: Annotated[
        str,
        "JSON object of Ray resources that each engine needs besides cores (--threads) and GPUs, "
        'e.g. `{"slot": 1}`.',
    ] = "{}"
    ray_engine_memory: Annotated[
        PositiveInt | None,
        "Bytes of memory that each engine asks Ray for; default: --kv-cache-memory-bytes on "
        "CPUs, else none.",
    ] = None
    ray_placement_groups: Annotated[
        tuple[str, ...],
        "Names of existing placement groups: the first rank's engine uses as many of the first "
        "group's leading bundles as it needs, and so on; further ranks get new groups.",
    ] = ()
    ray_namespace: Annotated[
        str | None,
        "Ray namespace of these groups and of Swell's actors; default: a new one for each run.",
    ] = None
    ray_env: Annotated[
        tuple[str, ...],
        "Names or patterns of this node's environment variables that are passed to engines on"
        " other nodes.",
    ] = ("HF_*", "NCCL_*", "UCX_*", "GLOO_*", "TORCH_*")
