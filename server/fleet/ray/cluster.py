"""The connection to a Ray cluster, as its driver. All calls into Ray that may wait are here.

What is made here belongs to this process's Ray job and is not detached: when the supervisor ends,
however it does, Ray removes its actors and placement groups.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from engine.shared.addresses import split_host_port
from engine.shared.logs import LogLines
from server.fleet.backend import CannotServe
from server.fleet.ray import actor as actor_module
from server.fleet.ray.packing import RayNode, Resources, amounts

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Seconds within which the cluster has to take a connection."""

OWN_OBJECT_STORE_BYTES = 128 * 2**20
"""Size of the object store of a cluster that we start ourselves; nothing is kept there."""

DEVICES_WITHIN = 20.0
"""Seconds that the bundles of a placement group have to tell their GPUs."""

NODE_LABEL = "ray.io/node-id"


class ActorLost(Exception):
    """An actor has gone.

    Args:
        alone: whether its node is known to have outlived it.
    """

    def __init__(self, reason: str, *, alone: bool) -> None:
        super().__init__(reason)
        self.alone = alone


class Group(NamedTuple):
    """A placement group for one rank, made but maybe not placed yet."""

    handle: Any
    bundle: Resources
    """What the rank's actor takes of the first bundle."""
    is_ours: bool = True
    """Whether it goes when its rank does."""
    gpus: tuple[float, ...] = ()
    """GPUs in each bundle, where the rank's are in several."""


class RayCluster:
    """A Ray cluster to which this process is connected."""

    def __init__(self, address: str | None, namespace: str | None = None) -> None:
        """Connect to the cluster at `address`, to one of this node, or to one of our own.

        To be called from the main thread; replaces the handler of SIGTERM.

        Raises:
            CannotServe: there is none, or one of other versions.
        """
        address = address or os.environ.get("RAY_ADDRESS") or _running_here()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {
            "log_to_driver": False,  # engines' lines come by way of their actors
            "configure_logging": False,
            "logging_level": logging.WARNING,
            "namespace": namespace,
        }
        self.is_own = address in (None, "local")
        try:
            if self.is_own:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OWN_OBJECT_STORE_BYTES,
                    **options,
                )
            else:
                assert address is not None
                _check_reachable(address)
                ray.init(address=address, **options)
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise CannotServe(_explained(address, error)) from error
        # What Ray prints about its nodes becomes log lines: the supervisor prints nothing itself,
        # and says what has become of its engines.
        said = logging.getLogger("ray.said")
        said.setLevel(logging.INFO if logger.isEnabledFor(logging.DEBUG) else logging.WARNING)
        sys.stdout = LogLines(said)
        self.own_node = str(ray.get_runtime_context().get_node_id())
        self.host = str(ray.util.get_node_ip_address())
        ray.cloudpickle.register_pickle_by_value(actor_module)
        self._actor = ray.remote(actor_module.EngineActor)

    def look(self) -> list[RayNode]:
        """Return the living nodes, the one of this process first, the others by address."""
        free = ray._private.state.available_resources_per_node()
        nodes = [
            RayNode(
                each["NodeID"],
                each["NodeManagerAddress"],
                each["Resources"],
                free.get(each["NodeID"], {}),
            )
            for each in ray.nodes()
            if each["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.id != self.own_node, node.name, node.id))

    async def nodes(self) -> list[RayNode]:
        """Return the living nodes as `look` does, without blocking the event loop."""
        return await asyncio.to_thread(self.look)

    async def reserve(
        self, name: str, bundle: Resources, *, node: str | None, never: Collection[str]
    ) -> Group:
        """Ask for room on one node.

        Args:
            bundle: how much.
            node: id of the node; None: any that has room, now or when one joins.
            never: ids of nodes that it must not be.
        """
        selector = {}
        if node is not None:
            selector = {NODE_LABEL: node}
        elif never:
            selector = {NODE_LABEL: f"!in({','.join(never)})"}
        making = asyncio.ensure_future(
            asyncio.to_thread(
                placement_group,
                [dict(bundle)],
                strategy="STRICT_PACK",
                name=name,
                bundle_label_selector=[selector] if selector else None,
            )
        )
        try:
            return Group(await asyncio.shield(making), bundle)
        except asyncio.CancelledError:
            await self.release(Group(await making, bundle))
            raise

    def existing(self, name: str, bundle: Resources) -> Group:
        """Return an existing placement group, of which one rank may use the first bundles.

        They are as many as it takes to have what a rank needs, e.g. one for each of its processes.

        Raises:
            CannotServe: there is none of that name, it has too little, or its bundles may be on
                several nodes.
        """
        try:
            handle = get_placement_group(name)
        except ValueError as error:
            raise CannotServe(
                f"--ray-placement-groups: there is no {name} in Ray's namespace "
                f"{ray.get_runtime_context().namespace} (--ray-namespace)"
            ) from error
        specs = handle.bundle_specs

        def suffice(count: int) -> bool:
            there = _sum_of(specs[:count])
            return all(there.get(name, 0.0) >= amount for name, amount in bundle.items())

        used = next(filter(suffice, range(1, len(specs) + 1)), None)
        if used is None:
            raise CannotServe(
                f"--ray-placement-groups: the bundles of {name} have "
                f"{amounts(_sum_of(specs))}, and a rank needs {amounts(bundle)}"
            )
        if used > 1 and placement_group_table(handle)["strategy"] != "STRICT_PACK":
            raise CannotServe(
                f"--ray-placement-groups: a rank needs {used} bundles of {name}, which may be on "
                "several nodes: make it with strategy STRICT_PACK"
            )
        first = {
            each: min(amount, specs[0][each]) for each, amount in bundle.items() if each in specs[0]
        }
        gpus = tuple(each.get("GPU", 0.0) for each in specs[:used]) if used > 1 else ()
        return Group(handle, first, is_ours=False, gpus=gpus if any(gpus) else ())

    async def devices(self, group: Group) -> str | None:
        """Return the GPUs of all bundles of a placed group, as CUDA_VISIBLE_DEVICES names them.

        None: not all bundles have answered within `DEVICES_WITHIN` seconds.
        """
        asked = [
            ray.remote(_own_gpus)
            .options(
                num_cpus=0,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group.handle, placement_group_bundle_index=index
                ),
            )
            .remote()
            for index, gpus in enumerate(group.gpus)
            if gpus
        ]
        try:
            told = await asyncio.to_thread(ray.get, asked, timeout=DEVICES_WITHIN)
        except ray.exceptions.GetTimeoutError:
            for each in asked:
                ray.cancel(each, force=True)
            return None
        return ",".join(device for devices in told for device in devices)

    async def placed_on(self, group: Group) -> str | None:
        """Return the id of the node on which a placement group is; None: on none yet."""
        table = await asyncio.to_thread(placement_group_table, group.handle)
        if table.get("state") != "CREATED":
            return None
        return str(table["bundles_to_node_id"][0])

    async def release(self, group: Group) -> None:
        """Remove a placement group of ours, and with it what runs there."""
        if not group.is_ours:
            return
        with contextlib.suppress(Exception):  # gone already, or with the cluster
            await asyncio.to_thread(remove_placement_group, group.handle)

    def start_actor(self, name: str, group: Group) -> "RemoteActor":
        """Start an actor in the first bundle of a placement group."""
        resources = dict(group.bundle)
        memory = resources.pop("memory", None)
        handle = self._actor.options(
            name=name,
            num_cpus=resources.pop("CPU", 0.0),
            num_gpus=resources.pop("GPU", 0.0),
            memory=None if memory is None else int(memory),
            resources=resources,
            max_restarts=0,  # its place is filled again by the keeper
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group.handle, placement_group_bundle_index=0
            ),
        ).remote(os.path.abspath(os.curdir))
        return RemoteActor(handle)

    def start_actor_on(self, name: str, node: str) -> "RemoteActor":
        """Start an actor that takes nothing of what is free on a node, by the node's id."""
        handle = self._actor.options(
            name=name,
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(os.path.abspath(os.curdir))
        return RemoteActor(handle)

    def close(self) -> None:
        """Leave the cluster, which removes what is left of ours; ends a cluster of our own."""
        ray.shutdown()


class RemoteActor:
    """An actor of ours, as `server.fleet.ray.actor.EngineActor` says."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and wait for what it returns.

        Raises:
            ActorLost: it has died, or cannot be reached.
            OSError: it says that something cannot be done on its node.
        """
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            raise OSError(str(getattr(cause, "cause", None) or cause)) from error
        except ray.exceptions.RayError as error:
            alone = isinstance(error, ray.exceptions.ActorDiedError)
            raise ActorLost(str(error).partition("\n")[0], alone=alone) from error

    def tell(self, method: str) -> None:
        """Call a method without waiting for it."""
        with contextlib.suppress(ray.exceptions.RayError):
            getattr(self._handle, method).remote()

    async def kill(self) -> None:
        """End the actor's process at once."""
        with contextlib.suppress(Exception):  # it has ended already, or with the cluster
            await asyncio.to_thread(ray.kill, self._handle, no_restart=True)


def _own_gpus() -> list[str]:
    """Return the GPUs of the bundle in which this runs; it goes there by value."""
    return [str(device) for device in ray.get_gpu_ids()]


def _sum_of(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(b.get(name, 0.0) for b in bundles) for b in bundles for name in b}


def _running_here() -> str | None:
    """Return the address of the cluster that `ray start` began on this node, if it still runs."""
    noted = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        address = noted.read_text().strip()
        _check_reachable(address)
    except (OSError, CannotServe, ValueError):
        return None
    return address


def _check_reachable(address: str) -> None:
    """Check in seconds what Ray would take a minute to find out.

    Raises:
        CannotServe: nothing listens there.
    """
    if "://" in address or address == "auto":
        if address.startswith("ray://"):
            raise CannotServe(
                f"{address} is the address for Ray's clients: run on a node of the cluster and "
                "give the address that `ray start` printed (HOST:6379), or submit a job"
            )
        return
    host, port = split_host_port(address)
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise CannotServe(_explained(address, error)) from error


def _explained(address: str | None, error: Exception) -> str:
    text = str(error)
    if "Version mismatch" in text:
        told = " ".join(text.split())
        return f"{told} Install the same version of Ray and Python on all nodes."
    if address is None or address == "local":
        return f"no Ray cluster of its own can be started: {text}"
    return (
        f"no Ray cluster answers at {address}: {text}. Begin one with `ray start --head`, or give "
        "another --ray-address (RAY_ADDRESS); with neither, `swell serve` starts its own"
    )
