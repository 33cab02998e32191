"""Settings of a cluster's engines and of the connections between its processes."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.shared.addresses import bare_host, is_literal, split_host_port
from engine.shared.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

_MANY_LAYERS = 100_000
_LONG_NUMBER = 10
"""More digits than the number of layers of any model."""


class ParallelConfig(Section, frozen=True, kw_only=True):
    """Parallelism"""

    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=1024),
        "Number of engines; default on a single node with CUDA devices: as many as they can run.",
    ] = 2
    data_parallel_size_local: Annotated[
        NonNegativeInt | None,
        "Number of engines on this node; default: all, or the one of --data-parallel-rank.",
    ] = None
    data_parallel_start_rank: Annotated[
        NonNegativeInt | None,
        "Rank of this node's first engine; default: the coordinator assigns ranks.",
    ] = None
    data_parallel_rank: Annotated[
        NonNegativeInt | None,
        "Rank of this engine; default: the coordinator assigns it. For a front end: the engine "
        "that it serves with --data-parallel-lb external.",
    ] = None
    data_parallel_rank_local: Annotated[
        NonNegativeInt | None,
        "Index of this engine on its node, which selects its CUDA devices; default: assigned by "
        "the supervisor, or --data-parallel-rank modulo --data-parallel-size-local for an engine "
        "started by itself.",
    ] = None
    data_parallel_lb: Annotated[
        Literal["internal", "hybrid", "external"],
        "Engines that an API server balances over; internal: the whole cluster; hybrid: its own "
        "node; external: only --data-parallel-rank, behind your own load balancer.",
    ] = "internal"

    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=256),
        "Processes (on CUDA: devices) per engine that each compute a part of every layer.",
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=256),
        "Stages that each engine's layers are split into. Each stage has its own processes (on "
        "CUDA: devices) and computes one batch while the others compute theirs.",
    ] = 1
    pipeline_layer_partition: Annotated[
        str | None,
        "Layers per stage, e.g. 10,14; default: an even split, with the last stage never the "
        "largest.",
    ] = None
    nnodes: Annotated[
        int,
        Meta(ge=1, le=256),
        "Number of nodes that one engine's pipeline stages are spread over. Run the same command "
        "on every node, changing only --node-rank.",
    ] = 1
    node_rank: Annotated[
        NonNegativeInt,
        "With --nnodes: rank of this node. Node 0 runs the engine, the coordinator and the API "
        "servers, the others only workers.",
    ] = 0
    master_addr: Annotated[
        str | None,
        "With --nnodes: address of node 0, reachable from the other nodes.",
    ] = None
    master_port: Annotated[
        int,
        Meta(ge=1, le=65535),
        "With --nnodes: port on node 0 that the other nodes connect to.",
    ] = 29501
    enable_expert_parallel: Annotated[
        bool,
        "Spread the experts of a mixture-of-experts model over the engines, which then run in "
        "lockstep.",
    ] = False
    enable_eplb: Annotated[
        bool,
        "Rebalance experts across processes by measured load.",
    ] = False
    num_redundant_experts: Annotated[
        NonNegativeInt,
        "Extra expert replicas per sparse layer, over all processes; the busiest experts get them.",
    ] = 0
    eplb_step_interval: Annotated[
        PositiveInt,
        "Steps between two rebalances of experts.",
    ] = 3000
    regroup: Annotated[
        Literal["shrink", "wait"],
        "What a lockstep group does when an engine dies; shrink: survivors take over its experts "
        "until it is back; wait: stall until it returns.",
    ] = "shrink"
    group_timeout: Annotated[
        PositiveFloat,
        "Seconds that lockstep engines wait for each other before they form a new group.",
    ] = 30.0

    def __post_init__(self) -> None:
        if self.pipeline_layer_partition is not None:
            self._check_partition(self.pipeline_layer_partition)
        _check_nodes(self)
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("--enable-eplb needs --enable-expert-parallel")
        if self.enable_eplb and self.data_parallel_size * self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-eplb balances the load of several processes: raise --data-parallel-size "
                "or --tensor-parallel-size, or leave it out"
            )
        if self.num_redundant_experts and not self.enable_eplb:
            raise ValueError("--num-redundant-experts needs --enable-eplb")

    def _check_partition(self, text: str) -> None:
        layers = self.layers_of_stages
        assert layers is not None
        if not all(0 < count < _MANY_LAYERS for count in layers):
            raise ValueError(
                f"pipeline_layer_partition is {text[:80]}: give each stage's number of layers, at "
                "least 1, as in 10,14"
            )
        if len(layers) != self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_layer_partition has {len(layers)} numbers for "
                f"--pipeline-parallel-size {self.pipeline_parallel_size}: give one for each stage"
            )

    @property
    def layers_of_stages(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage, 0 for a part that is not a number; None if not set."""
        if self.pipeline_layer_partition is None:
            return None
        parts = [part.strip() for part in self.pipeline_layer_partition.split(",")]
        return tuple(int(part) if _is_number(part) else 0 for part in parts)

    @property
    def processes(self) -> int:
        """Number of processes (on CUDA: devices) that compute one engine's model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def processes_on_node(self) -> int:
        """Number of those processes on each node that the engine spans."""
        return self.processes // self.nnodes

    @property
    def engines_on_node(self) -> int:
        """Number of engines that this node runs."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def number_on_node(self) -> int:
        """Index of this engine on its node; ranks can interleave between nodes."""
        if self.data_parallel_rank_local is not None:
            return self.data_parallel_rank_local
        return (self.data_parallel_rank or 0) % max(1, self.data_parallel_size_local or 1)

    def rank_on_node(self, number: int) -> int | None:
        """Return the rank of the node's engine `number`; None if the coordinator assigns it."""
        first = self.data_parallel_start_rank
        if first is None:
            first = self.data_parallel_rank
        return None if first is None else first + number


def _check_nodes(parallel: ParallelConfig) -> None:
    if parallel.node_rank >= parallel.nnodes:
        raise ValueError(
            f"--node-rank {parallel.node_rank} with --nnodes {parallel.nnodes}: nodes are numbered "
            "from 0"
        )
    if parallel.nnodes == 1:
        return
    if parallel.master_addr is None:
        raise ValueError(
            f"--nnodes {parallel.nnodes} needs --master-addr, the address of the node that has "
            "--node-rank 0"
        )
    host = bare_host(parallel.master_addr)
    if not host or host.split() != [host] or (":" in host and not is_literal(host)):
        raise ValueError(
            f"--master-addr {parallel.master_addr} is neither a name nor an address: the port is "
            "--master-port"
        )
    if parallel.data_parallel_size != 1:
        raise ValueError(
            f"--nnodes {parallel.nnodes} needs --data-parallel-size 1: one engine can span nodes. "
            "Several engines, each on one node, need --data-parallel-address instead of "
            "--nnodes"
        )
    if parallel.pipeline_parallel_size % parallel.nnodes:
        raise ValueError(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size} cannot be divided by "
            f"--nnodes {parallel.nnodes}: each node gets the same number of stages, and the "
            "tensor-parallel parts of a stage are on one node"
        )
    if parallel.enable_expert_parallel:
        raise ValueError(
            "--nnodes cannot be combined with --enable-expert-parallel, which needs "
            "--pipeline-parallel-size 1"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _LONG_NUMBER


DEFAULT_COORDINATOR = "127.0.0.1:7550"


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Cluster"""

    coordinator: Annotated[
        str | None,
        "Address of the coordinator: HOST:PORT, [IPV6]:PORT or ipc://PATH; with * as the host it "
        "listens on all interfaces; default: `swell serve` runs its own, everything else connects "
        "to 127.0.0.1:7550.",
    ] = None
    node: Annotated[str | None, "Name of this node; default: its host name."] = None
    engine_group: Annotated[
        str,
        Meta(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$"),
        "Engine group of this process: front ends use engines of their own group only, so that two "
        "models can be served side by side while one replaces the other.",
    ] = ""
    advertise_host: Annotated[
        str | None,
        "Name or address under which other nodes reach this one; default: the address of the "
        "interface that leads to the coordinator.",
    ] = None
    socket_dir: Annotated[
        str | None,
        "Directory in which this node creates a private one for its local sockets; default: the "
        "system's temporary directory.",
    ] = None
    cluster_key_file: Annotated[
        str | None,
        "File with the shared secret (at least 16 bytes) that encrypts and authenticates TCP "
        "connections between nodes.",
    ] = None
    accepted_cluster_key_file: Annotated[
        str | None,
        "File with a second shared secret that is also accepted, so that the secret can be "
        "changed without stopping anything. It may be missing; both files are read again when"
        " they change.",
    ] = None
    insecure_cluster: Annotated[bool, "Allow plain TCP between nodes (trusted networks only)."] = (
        False
    )
    heartbeat_interval: Annotated[
        PositiveFloat, "Seconds between heartbeats, to the coordinator and on TCP connections."
    ] = 1.0
    drain_timeout: Annotated[
        float, Meta(ge=0), "Seconds that an engine has after SIGTERM to finish its requests."
    ] = 30.0
    join_timeout: Annotated[
        PositiveFloat,
        "Seconds for which an engine waits for a coordinator that does not answer; on a --headless "
        "node at least --startup-timeout.",
    ] = 60.0
    engine_timeout: Annotated[
        PositiveFloat, "Seconds without a heartbeat after which a member counts as gone."
    ] = 5.0

    def __post_init__(self) -> None:
        if self.coordinator is not None and "://" not in self.coordinator:
            split_host_port(self.coordinator)

    @property
    def coordinator_address(self) -> str:
        """The coordinator's ZeroMQ address."""
        address = self.coordinator or DEFAULT_COORDINATOR
        return address if "://" in address else f"tcp://{address}"
