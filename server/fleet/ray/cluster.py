"""The connection to a Ray cluster as its driver; contains all blocking calls into Ray.

Actors and placement groups belong to this process's Ray job and are not detached: when the
supervisor exits, for whatever reason, Ray removes them.
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
"""Timeout of connecting to the cluster, in seconds."""

OWN_OBJECT_STORE_BYTES = 128 * 2**20
"""Size of the object store of a cluster started here; nothing is stored in it."""

DEVICES_TIMEOUT = 20.0
"""Seconds for the bundles of a placement group to report their GPUs."""

NODE_LABEL = "ray.io/node-id"


class ActorLost(Exception):
    """An actor was lost.

    Args:
        node_survived: whether its node is known to have survived it.
    """

    def __init__(self, reason: str, *, node_survived: bool) -> None:
        super().__init__(reason)
        self.node_survived = node_survived


class Group(NamedTuple):
    """A placement group for one rank, created but possibly not placed yet."""

    handle: Any
    bundle: Resources
    """Resources that the rank's actor takes from the first bundle."""
    is_created_here: bool = True
    """Whether it is removed with its rank."""
    gpus: tuple[float, ...] = ()
    """GPUs per bundle, if the rank's GPUs are spread over several."""


class RayCluster:
    """The Ray cluster that this process is connected to."""

    def __init__(self, address: str | None, namespace: str | None = None) -> None:
        """Connect to the cluster at `address`, else to one running on this node, else start one.

        Call from the main thread; replaces the handler of SIGTERM.

        Raises:
            CannotServe: the cluster is unreachable, or has other versions.
        """
        address = address or os.environ.get("RAY_ADDRESS") or _running_here()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {
            "log_to_driver": False,  # engines' output comes through their actors
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
        # Ray's messages about its nodes become log lines: the supervisor prints nothing else to
        # stdout, and reports its engines' failures itself.
        ray_logger = logging.getLogger("ray.said")
        ray_logger.setLevel(logging.INFO if logger.isEnabledFor(logging.DEBUG) else logging.WARNING)
        sys.stdout = LogLines(ray_logger)
        self.own_node = str(ray.get_runtime_context().get_node_id())
        self.host = str(ray.util.get_node_ip_address())
        ray.cloudpickle.register_pickle_by_value(actor_module)
        self._actor = ray.remote(actor_module.EngineActor)

    def list_nodes(self) -> list[RayNode]:
        """Return the live nodes, this process's first, the others by address."""
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
        """Return the live nodes as `list_nodes` does, without blocking the event loop."""
        return await asyncio.to_thread(self.list_nodes)

    async def reserve(
        self, name: str, bundle: Resources, *, node: str | None, excluded: Collection[str]
    ) -> Group:
        """Request a placement group on one node.

        Args:
            node: id of the node; None: any with enough resources, now or later.
            excluded: ids of excluded nodes.
        """
        selector = {}
        if node is not None:
            selector = {NODE_LABEL: node}
        elif excluded:
            selector = {NODE_LABEL: f"!in({','.join(excluded)})"}
        creation = asyncio.ensure_future(
            asyncio.to_thread(
                placement_group,
                [dict(bundle)],
                strategy="STRICT_PACK",
                name=name,
                bundle_label_selector=[selector] if selector else None,
            )
        )
        try:
            return Group(await asyncio.shield(creation), bundle)
        except asyncio.CancelledError:
            await self.release(Group(await creation, bundle))
            raise

    def existing(self, name: str, bundle: Resources) -> Group:
        """Return an existing placement group, of which one rank uses the first bundles.

        It uses the minimum number that satisfies its needs, e.g. one for each of its processes.

        Raises:
            CannotServe: no group has this name, it is too small, or the bundles may be on several
                nodes.
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
            total = _sum_of(specs[:count])
            return all(total.get(name, 0.0) >= amount for name, amount in bundle.items())

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
        return Group(handle, first, is_created_here=False, gpus=gpus if any(gpus) else ())

    async def devices(self, group: Group) -> str | None:
        """Return the GPUs of all bundles of a placed group, in the form of CUDA_VISIBLE_DEVICES.

        None if not all bundles have answered within `DEVICES_TIMEOUT` seconds.
        """
        queries = [
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
            results = await asyncio.to_thread(ray.get, queries, timeout=DEVICES_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            for each in queries:
                ray.cancel(each, force=True)
            return None
        return ",".join(device for devices in results for device in devices)

    async def placed_on(self, group: Group) -> str | None:
        """Return the node id of a placement group; None if it is not placed yet."""
        table = await asyncio.to_thread(placement_group_table, group.handle)
        if table.get("state") != "CREATED":
            return None
        return str(table["bundles_to_node_id"][0])

    async def release(self, group: Group) -> None:
        """Remove a placement group of ours, including its actors."""
        if not group.is_created_here:
            return
        with contextlib.suppress(Exception):  # already removed, or the cluster is gone
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
            max_restarts=0,  # the keeper restarts it
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group.handle, placement_group_bundle_index=0
            ),
        ).remote(os.path.abspath(os.curdir))
        return RemoteActor(handle)

    def start_actor_on(self, name: str, node: str) -> "RemoteActor":
        """Start an actor without resources on a node, given the node's id."""
        handle = self._actor.options(
            name=name,
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(os.path.abspath(os.curdir))
        return RemoteActor(handle)

    def close(self) -> None:
        """Disconnect, which removes everything of ours; stops a cluster that was started here."""
        ray.shutdown()


class RemoteActor:
    """Client of a `server.fleet.ray.actor.EngineActor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and wait for its result.

        Raises:
            ActorLost: the actor has died, or cannot be reached.
            OSError: the method failed on its node.
        """
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            raise OSError(str(getattr(cause, "cause", None) or cause)) from error
        except ray.exceptions.RayError as error:
            node_survived = isinstance(error, ray.exceptions.ActorDiedError)
            raise ActorLost(str(error).partition("\n")[0], node_survived=node_survived) from error

    def notify(self, method: str) -> None:
        """Call a method without waiting for it."""
        with contextlib.suppress(ray.exceptions.RayError):
            getattr(self._handle, method).remote()

    async def kill(self) -> None:
        """Kill the actor's process."""
        with contextlib.suppress(Exception):  # already exited, or the cluster is gone
            await asyncio.to_thread(ray.kill, self._handle, no_restart=True)


def _own_gpus() -> list[str]:
    """Return the GPUs of the current bundle; runs as a Ray task, pickled by value."""
    return [str(device) for device in ray.get_gpu_ids()]


def _sum_of(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(b.get(name, 0.0) for b in bundles) for b in bundles for name in b}


def _running_here() -> str | None:
    """Return the address of the cluster that `ray start` started on this node, if it still runs."""
    file = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
        _check_reachable(address)
    except (OSError, CannotServe, ValueError):
        return None
    return address


def _check_reachable(address: str) -> None:
    """Check quickly that an address is reachable; Ray would take a minute to fail."""
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
        message = " ".join(text.split())
        return f"{message} Install the same version of Ray and Python on all nodes."
    if address is None or address == "local":
        return f"cannot start a Ray cluster on this node: {text}"
    return (
        f"no Ray cluster answers at {address}: {text}. Start one with `ray start --head`, or give "
        "another --ray-address (RAY_ADDRESS); with neither, `swell serve` starts its own"
    )
