"""The places that a supervisor fills: the program and parameters of each."""

import asyncio
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from coordinator.config import CoordinatorLaunch
from engine.shared.config import EngineLaunch
from engine.shared.cpu.lists import CpuList
from engine.shared.messages import MemberKind
from server.access.admission_table import create_admission_table
from server.config import ServeConfig
from server.fleet.child import Child
from server.fleet.holder import Holder, Starter
from server.fleet.restarts import Restarts
from server.router.load_table import create_load_table


@dataclass(kw_only=True)
class Role:
    """One place to fill: what to run there and how its present holder is doing."""

    name: str
    module: str
    launch: Callable[[int], Any]
    """Makes the launch parameters for an incarnation."""
    member: tuple[MemberKind, int] | None = None
    """What to report to the coordinator when the holder dies."""
    environment: dict[str, str] = field(default_factory=dict)
    inherit: tuple[int, ...] = ()
    start: Starter = Child.start
    """Starts what is to fill the place: a process of this node, or one elsewhere."""
    holder: Holder | None = None
    keeping: asyncio.Task[None] | None = None
    """The task that keeps the place filled."""
    incarnation: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    phase: str = "starting"
    waits_for: str = ""
    """Names of the resources for which its holder waits."""
    failure: str | None = None
    restarts: Restarts = field(default_factory=Restarts)


def coordinator_role(config: ServeConfig, *, is_new: bool, cpus: CpuList = ()) -> Role:
    """Return the coordinator's place; in a new cluster the first one has no predecessors.

    Args:
        cpus: what it runs on; empty: any.
    """
    starts = itertools.count()
    return Role(
        name="coordinator",
        module="coordinator",
        launch=lambda _: CoordinatorLaunch(
            config.coordinator(), has_predecessors=next(starts) > 0 or not is_new, cpus=cpus
        ),
    )


def control_address(directory: Path) -> str:
    """Return where a node's supervisor listens for its front ends."""
    return f"ipc://{directory}/control"


def front_end_roles(
    config: ServeConfig,
    directory: Path,
    listen_fd: int,
    *,
    numbered: bool,
    scalable: bool,
    cpus: CpuList = (),
) -> list[Role]:
    """Return the places of all front ends of a node.

    Args:
        directory: the node's private directory; the files that front ends share are made in it.
        listen_fd: the bound HTTP socket that front ends inherit.
        numbered: whether they are the cluster's only ones, so that their places are their numbers.
        scalable: whether the node runs engines, whose number can be changed.
        cpus: what they run on; empty: any.
    """
    metrics = directory / "metrics"
    metrics.mkdir(exist_ok=True)
    load_table = directory / "loads"
    create_load_table(load_table, config.supervisor.api_server_count)
    create_admission_table(directory / "admission", config.supervisor.api_server_count)
    make = functools.partial(
        _front_end_role, config, directory, listen_fd, numbered=numbered, scalable=scalable
    )
    return [make(place, cpus) for place in range(config.supervisor.api_server_count)]


def engine_role(config: ServeConfig, place: int, *, numbered: bool = True) -> Role:
    """Return the place of one engine of a node, the first being number 0.

    Unless it is `numbered` as the settings say, the coordinator gives it a rank.
    """
    engine = config.engine()
    rank = engine.parallel.rank_on_node(place) if numbered else None
    parallel = msgspec.structs.replace(
        engine.parallel,
        data_parallel_rank=rank,
        data_parallel_rank_local=place,
        data_parallel_size_local=engine.parallel.engines_on_node,
    )
    of_rank = msgspec.structs.replace(engine, parallel=parallel)
    return Role(
        name=f"engine {place if rank is None else rank}",
        module="engine",
        launch=lambda incarnation: EngineLaunch(of_rank, incarnation),
        member=("engine", -1 if rank is None else rank),
    )


def _front_end_role(
    config: ServeConfig,
    directory: Path,
    listen_fd: int,
    place: int,
    cpus: CpuList,
    *,
    numbered: bool,
    scalable: bool,
) -> Role:
    index = place if numbered else -1

    def launch(incarnation: int) -> dict[str, object]:
        # The fields of `server.front_end.FrontEndLaunch`, whose module would bring the whole HTTP
        # stack into the supervisor.
        return {
            "config": config.front_end(),
            "index": index,
            "place": place,
            "incarnation": incarnation,
            "socket_dir": str(directory),
            "listen_fd": listen_fd,
            "control": control_address(directory) if scalable else None,
            "engines_may_wait": config.ray.data_parallel_backend == "ray",
            "load_table": str(directory / "loads"),
            "admission_table": str(directory / "admission"),
            "cpus": cpus,
        }

    return Role(
        name=f"api {place}",
        module="server",
        launch=launch,
        member=("front_end", index),
        environment={"PROMETHEUS_MULTIPROC_DIR": str(directory / "metrics")},
        inherit=(listen_fd,),
    )
