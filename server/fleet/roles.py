"""The roles of a node's processes: their programs and launch parameters."""

import itertools
import mmap
import os
from pathlib import Path

from coordinator.config import CoordinatorLaunch
from engine.shared.config import EngineLaunch
from engine.shared.cpu.lists import CpuList
from engine.shared.node_directory import NodeDirectory
from server.access.admission_table import create_admission_table
from server.config import ServeConfig
from server.fleet.keeper import Role
from server.router.load_table import create_load_table


def coordinator_role(config: ServeConfig, *, is_new: bool, cpus: CpuList = ()) -> Role:
    """Return the coordinator's role; in a new cluster its first process has no predecessors.

    Args:
        cpus: CPUs to bind to; empty: any.
    """
    starts = itertools.count()
    size, here = config.parallel.data_parallel_size, config.parallel.engines_on_node
    planned = size if config.nodes.data_parallel_address is not None and here < size else None
    return Role(
        name="coordinator",
        module="coordinator",
        launch=lambda _: CoordinatorLaunch(
            config.coordinator(),
            has_predecessors=next(starts) > 0 or not is_new,
            planned_engines=planned,
            cpus=cpus,
        ),
    )


def control_address(directory: Path) -> str:
    """Return the address where a node's supervisor listens for its front ends."""
    return f"ipc://{directory}/control"


def front_end_roles(
    config: ServeConfig,
    node: NodeDirectory,
    listen_fd: int,
    *,
    numbered: bool,
    scalable: bool,
    cpus: CpuList = (),
) -> list[Role]:
    """Return the roles of all front ends of a node.

    Args:
        node: the node's private directory; the front ends' shared files are created in it.
        listen_fd: the bound HTTP socket that front ends inherit.
        numbered: whether there are no others in the cluster, so that they number themselves.
        scalable: whether the node runs engines, whose number can be changed.
        cpus: CPUs to bind to; empty: any.
    """
    slots = range(config.supervisor.api_server_count)
    create_load_table(node.share("loads"), len(slots))
    for name in ("name", "rows", *(f"row-{slot}" for slot in slots)):
        node.share(f"admission/{name}")
    create_admission_table(node.path / "admission", len(slots))
    for slot in slots:
        for kind in ("counter", "histogram"):
            # The names that prometheus_client opens. It cannot read an empty file, which another
            # front end could find before the file's writer has started.
            os.truncate(node.share(f"metrics/{kind}_api-{slot}.db"), mmap.PAGESIZE)

    def role_of(slot: int) -> Role:
        index = slot if numbered else -1

        def launch(incarnation: int) -> dict[str, object]:
            # The fields of `server.front_end.FrontEndLaunch`, whose module would load the whole
            # HTTP stack into the supervisor.
            return {
                "config": config.front_end(),
                "index": index,
                "slot": slot,
                "incarnation": incarnation,
                "socket_dir": str(node.path),
                "listen_fd": listen_fd,
                "control": control_address(node.path) if scalable else None,
                "engines_may_wait": config.ray.data_parallel_backend == "ray",
                "load_table": str(node.path / "loads"),
                "admission_table": str(node.path / "admission"),
                "cpus": cpus,
                "replaced": dict(role.replaced),
            }

        role = Role(
            name=f"api {slot}",
            module="server",
            launch=launch,
            member=("front_end", index),
            environment={"PROMETHEUS_MULTIPROC_DIR": str(node.path / "metrics")},
            inherit=(listen_fd,),
        )
        return role

    return [role_of(slot) for slot in slots]


def engine_role(config: ServeConfig, slot: int, *, numbered: bool = True) -> Role:
    """Return the role of a node's engine number `slot`, counted from 0.

    Unless it is `numbered` according to the settings, the coordinator assigns its rank.
    """
    engine = config.engine()
    rank = engine.parallel.rank_on_node(slot) if numbered else None
    port = engine.health.health_port
    of_rank = engine.changed(
        parallel={
            "data_parallel_rank": rank,
            "data_parallel_rank_local": slot,
            "data_parallel_size_local": engine.parallel.engines_on_node,
        },
        health={"health_port": None if port is None else port + slot},
    )
    return Role(
        name=f"engine {slot if rank is None else rank}",
        module="engine",
        interpreter=engine.executor.engine_python,
        launch=lambda incarnation: EngineLaunch(of_rank, incarnation),
        member=("engine", -1 if rank is None else rank),
    )
