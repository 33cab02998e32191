"""A supervisor's connection to the coordinator of a cluster of several nodes."""

import asyncio
import secrets
import time

import zmq

from engine.shared.config import ClusterConfig
from engine.shared.messages import ControlRequest, ControlStatus, NodeOrder, Refused, encode
from engine.shared.scope import node_name
from engine.shared.transport import Inbox, Transport
from server.fleet.node_scaling import NodeScaling
from server.fleet.scaling import EngineScaler

_LOOK_INTERVAL = 0.1
"""Seconds between two looks at whether there is something to report."""


class NodeLink:
    """Reports what the node runs, and has its scaler do what the coordinator decides."""

    def __init__(
        self, scaler: EngineScaler, capacity: int, cluster: ClusterConfig, transport: Transport
    ) -> None:
        """Connect.

        Args:
            capacity: how many engines the node can run.

        Raises:
            InsecureCluster: there is no key, and --insecure-cluster is not set.
        """
        incarnation = secrets.randbits(48)
        self._scaler = scaler
        self._scaling = NodeScaling(
            node_name(cluster), incarnation, capacity, cluster.heartbeat_interval,
            cluster.engine_group,
        )  # fmt: skip
        socket = transport.connect(
            zmq.DEALER, cluster.coordinator_address, identity=f"node-{incarnation:x}".encode()
        )
        self._orders = Inbox(socket, NodeOrder | Refused, "registration")
        self._orders.attach(asyncio.get_running_loop(), self._receive)

    def handle(self, request: ControlRequest) -> ControlStatus:
        """Pass an operator's wish on; return the state of all nodes at once."""
        status = self._scaling.handle(request, self._scaler.status)
        self._report()
        return status

    async def run(self) -> None:
        """Report for ever."""
        while True:
            self._report()
            await asyncio.sleep(_LOOK_INTERVAL)

    def _report(self) -> None:
        report = self._scaling.tick(self._scaler.status, time.monotonic())
        if report is not None:
            self._orders.send(encode(report))

    def _receive(self, _sender: bytes, order: NodeOrder | Refused) -> None:
        if isinstance(order, Refused):
            self._scaling.refused(order.reason)
            return
        assignment = self._scaling.receive(order)
        if assignment is not None:
            self._scaler.assign(assignment.target, restart=assignment.restart)
            self._report()

    def close(self) -> None:
        """Say that the node ends, and close the socket."""
        self._orders.send(encode(self._scaling.leave(self._scaler.status)))
        self._orders.close(linger_ms=200)
