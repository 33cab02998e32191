"""Settings of a node's processes, and of several nodes."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import PositiveFloat, Section


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """Processes"""

    api_server_count: Annotated[
        int,
        Meta(ge=0, le=256),
        "Number of API-server processes on this node; 0: only engines, for others.",
    ] = 2
    startup_timeout: Annotated[PositiveFloat, "Seconds until every process has to be ready."] = (
        600.0
    )


class NodesConfig(Section, frozen=True, kw_only=True):
    """Several nodes"""

    data_parallel_address: Annotated[
        str | None,
        "Address of the head node: `swell serve` hosts the coordinator there, for this node and "
        "for others; with --headless it is where to join.",
    ] = None
    data_parallel_rpc_port: Annotated[
        int,
        Meta(ge=1, le=65532),
        "Port of the head's coordinator, which takes the three after it too.",
    ] = 7550
    headless: Annotated[
        bool, "Only engines here, for the front ends of the head that they join."
    ] = False
