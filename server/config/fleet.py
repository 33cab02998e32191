"""Settings of a node's processes, and of several nodes."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import PositiveFloat, Section


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """Processes"""

    api_server_count: Annotated[
        int,
        Meta(ge=0, le=256),
        "Number of API-server processes on this node; 0: engines only.",
    ] = 2
    startup_timeout: Annotated[
        PositiveFloat, "Seconds within which every process has to be ready."
    ] = 600.0


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
        "Port of the head's coordinator, which also takes the next three.",
    ] = 7550
    headless: Annotated[bool, "Run engines only, for the front ends of the head node."] = False
