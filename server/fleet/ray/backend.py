"""`--data-parallel-backend ray`: runs a supervisor's engines on a Ray cluster."""

import logging
import os
import secrets
import time
from pathlib import Path

import msgspec

from engine.shared.addresses import first_free_ports, join_host_port
from engine.shared.cpu.lists import CpuList
from server.config import ServeConfig
from server.fleet.backend import CannotServe, Joining
from server.fleet.keeper import Role
from server.fleet.ray.cluster import RayCluster
from server.fleet.ray.packing import Packing, RayNode, max_ranks_per_node
from server.fleet.ray.resources import (
    copied_environment,
    engine_config,
    rank_resources,
    uses_gpus,
)
from server.fleet.ray.starter import Ranks, api_server_role
from server.fleet.roles import engine_role

logger = logging.getLogger(__name__)

COORDINATOR_PORTS = 4
"""Number of consecutive ports that the coordinator listens on."""

RELEASE_TIMEOUT = 5.0
"""Seconds to wait for resources in use: Ray reports with a delay that a fleet released them."""


class RayBackend:
    """Places the engines of one supervisor on a Ray cluster.

    Args:
        directory: private directory of this node, for a generated key.

    Raises:
        CannotServe: there is no usable cluster, or it is too small without --ray-wait-for-nodes,
            or settings contradict each other.
        OSError: the coordinator's ports are taken.
    """

    has_all = True
    cpus_of_others: CpuList = ()
    """Any: Ray does not report which CPUs its actors have."""

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        _check(config)
        self._cluster = RayCluster(config.ray.ray_address, config.ray.ray_namespace)
        try:
            nodes = self._cluster.list_nodes()
            has_gpus = any(node.total.get("GPU") for node in nodes)
            engine, parallel = config.engine(), config.parallel
            needs = rank_resources(engine, config.ray, has_gpus=has_gpus)
            existing = [
                self._cluster.existing(name, needs) for name in config.ray.ray_placement_groups
            ]
            packing = Packing(
                config.ray.ray_dp_pack_strategy,
                needs,
                parallel.data_parallel_size_local,
                self._cluster.own_node,
            )
            ranks_to_place = max(0, parallel.data_parallel_size - len(existing))
            if not config.ray.ray_wait_for_nodes:
                nodes = self._nodes_with_room(packing, nodes, ranks_to_place)
            planned = packing.plan(nodes, ranks_to_place)
            self._own_name = nodes[0].name
            self._gpus = uses_gpus(engine, has_gpus=has_gpus)
            self._max_engines_per_node = max_ranks_per_node(planned)
            joined = self._joined(config, directory)
        except BaseException:
            self._cluster.close()
            raise
        key_file = joined.cluster.cluster_key_file
        has_own_key = key_file != config.cluster.cluster_key_file
        self.joined = Joining(joined, leads=True, is_single_node=False, is_new=has_own_key)
        self._ranks = Ranks(
            cluster=self._cluster,
            packing=packing,
            environment=copied_environment(config.ray.ray_env, os.environ),
            cluster_key=None if key_file is None else Path(key_file).read_bytes(),
            planned={f"engine {rank}": node.id for rank, node in enumerate(planned, len(existing))},
            existing={f"engine {rank}": group for rank, group in enumerate(existing)},
        )
        if len(nodes) > 1 and os.environ.get("RAY_USE_TLS") != "1":
            logger.warning(
                "Ray's own connections are not encrypted (RAY_USE_TLS=1 does it), and engines get "
                "the cluster key over them: keep others out of this network"
            )

    def _nodes_with_room(self, packing: Packing, nodes: list[RayNode], ranks: int) -> list[RayNode]:
        """Return the live nodes once they have room for this many new ranks.

        Waits only if the cluster without its other users is large enough.

        Raises:
            CannotServe: there is no room.
        """
        deadline = time.monotonic() + RELEASE_TIMEOUT
        unused = [node._replace(free=node.total) for node in nodes]
        can_wait = packing.refusal(unused, ranks) is None
        while (refusal := packing.refusal(nodes, ranks)) is not None:
            if not can_wait or time.monotonic() > deadline:
                raise CannotServe(refusal)
            time.sleep(0.2)
            nodes = self._cluster.list_nodes()
        return nodes

    def _joined(self, config: ServeConfig, directory: Path) -> ServeConfig:
        """Return the settings with a coordinator address for other nodes, and its key."""
        host = config.nodes.data_parallel_address or self._cluster.host
        port = first_free_ports(host, config.nodes.data_parallel_rpc_port, COORDINATOR_PORTS)
        key_file = config.cluster.cluster_key_file
        if key_file is None and not config.cluster.insecure_cluster:
            own = directory / "cluster.key"
            own.touch(mode=0o600)
            own.write_text(secrets.token_hex(32))
            key_file = str(own)
        return config.changed(
            cluster={
                "coordinator": join_host_port(host, port),
                "cluster_key_file": key_file,
                "node": self._own_name,
            },
            parallel={"data_parallel_size_local": None, "data_parallel_start_rank": 0},
        )

    def engine_role(self, config: ServeConfig, slot: int, *, numbered: bool) -> Role:
        """Return the role of a rank; all are numbered here."""
        role = engine_role(config, slot)
        launch = role.launch

        def on_its_node(incarnation: int) -> object:
            of_rank = launch(incarnation)
            adapted = engine_config(
                of_rank.config, gpus=self._gpus, max_engines_per_node=self._max_engines_per_node
            )
            return msgspec.structs.replace(of_rank, config=adapted)

        role.launch = on_its_node
        role.start = self._ranks.start
        return role

    def api_server_role(self, config: ServeConfig, node: str, port: int) -> Role | None:
        """Return the role of an API server on another node; None for the supervisor's own.

        Args:
            node: name of a node with an engine.
            port: port to listen on, at the node's address.
        """
        if node == self._own_name:
            return None
        return api_server_role(self._ranks, config.front_end(), node, port)

    def close(self) -> None:
        """Disconnect from the cluster."""
        self._cluster.close()


def _check(config: ServeConfig) -> None:
    nodes, cluster, parallel = config.nodes, config.cluster, config.parallel
    if nodes.headless or cluster.coordinator is not None:
        raise CannotServe(
            "--data-parallel-backend ray places the engines of all nodes with one command: leave "
            "out --headless and --coordinator"
        )
    if parallel.data_parallel_lb == "external":
        raise CannotServe(
            "--data-parallel-backend ray places API servers by node, not by engine: leave out "
            "--data-parallel-lb external, and give it to a `swell api-server --coordinator ... "
            "--data-parallel-rank N` for each engine"
        )
    if parallel.data_parallel_lb == "hybrid" and config.ray.api_server_placement != "every-node":
        raise CannotServe(
            "--data-parallel-lb hybrid has API servers that use the engines of their own node "
            "only: add --api-server-placement every-node"
        )
    if parallel.data_parallel_rank is not None or parallel.data_parallel_start_rank is not None:
        raise CannotServe(
            "--data-parallel-backend ray assigns the ranks itself: leave out --data-parallel-rank "
            "and --data-parallel-start-rank"
        )
    if config.ray.api_server_placement == "every-node" and config.http.uds is not None:
        raise CannotServe(
            "--api-server-placement every-node listens on the nodes' addresses: leave out --uds"
        )
    if config.executor.bound_to:
        raise CannotServe(
            "--cpu-bind with lists of CPUs is for engines of this node, and Ray chooses the nodes: "
            "leave it out"
        )
    if parallel.data_parallel_size_local == 0 and config.ray.ray_dp_pack_strategy == "strict":
        raise CannotServe(
            "--data-parallel-size-local 0 keeps ranks off this node, and strict packing has as "
            "many on each: add --ray-dp-pack-strategy fill"
        )
