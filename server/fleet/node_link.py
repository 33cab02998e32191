"""A supervisor's part in scaling a cluster of several nodes."""

import asyncio
import secrets
import time
from collections import Counter

import msgspec
import zmq

from engine.shared.config import ClusterConfig
from engine.shared.messages import (
    Assignment,
    ControlQuery,
    ControlRequest,
    ControlStatus,
    NodeEngines,
    NodeOrder,
    NodeReport,
    Refused,
    RestartEngines,
    ScaleEngines,
    ScalingRequest,
    encode,
)
from engine.shared.scope import node_name
from engine.shared.transport import Inbox, Transport
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION, next_protocol
from server.fleet.scaling import EngineScaler
from server.router.load_table import MAX_ENGINES

_POLL_INTERVAL = 0.1
"""Seconds between checks whether a report is due."""


class NodeScaling:
    """One node of several: its reports, its assignments, and operators' requests.

    A state machine without I/O: `NodeLink` owns the socket.
    """

    def __init__(
        self, name: str, incarnation: int, capacity: int, interval: float, group: str = ""
    ) -> None:
        """Report every `interval` seconds, and immediately on changes."""
        self._name = name
        self._group = group
        self._incarnation = incarnation
        self._capacity = capacity
        self._interval = interval
        self._protocol = PROTOCOL_VERSION
        self._assigned = 0
        self._request: ScalingRequest | None = None
        self._order: NodeOrder | None = None
        self._error: str | None = None
        self._reported: NodeReport | None = None
        self._due = float("-inf")

    def tick(self, own: ControlStatus, now: float) -> NodeReport | None:
        """Return the report if one is due at `now` (seconds, monotonic).

        Args:
            own: the engines of this node.
        """
        report = self.report(own)
        if report == self._reported and now < self._due:
            return None
        self._reported, self._due = report, now + self._interval
        return report

    def receive(self, order: NodeOrder) -> Assignment | None:
        """Process an order; return the assignment if it is new."""
        self._order = order
        if self._request is not None and order.acknowledged == self._request.number:
            self._request, self._error = None, order.error
        assignment = order.assignment
        if assignment is None or assignment.number <= self._assigned:
            return None
        self._assigned = assignment.number
        return assignment

    def refused(self, refusal: Refused) -> None:
        """Record that the coordinator refused this node."""
        reason = refusal.reason
        if refusal.field == "protocol":
            self._protocol = next_protocol(self._protocol)
            if self._protocol != PROTOCOL_VERSION:
                return  # the other protocol is tried first
        self._request, self._error = None, f"the coordinator refused this node: {reason}"

    def handle(self, request: ControlRequest, own: ControlStatus) -> ControlStatus:
        """Record an operator's request; return the state of all nodes."""
        match request:
            case ScaleEngines(size) if not 1 <= size <= MAX_ENGINES:
                error = f"there can be 1 to {MAX_ENGINES} engines, not {size}"
                return self._status(own, error)
            case ScaleEngines(size):
                self._request_scaling(size)
            case RestartEngines():
                self._request_scaling(None)
            case ControlQuery():
                pass
        return self._status(own, self._error)

    def _request_scaling(self, size: int | None) -> None:
        self._request = ScalingRequest(1 + secrets.randbits(48), size)
        self._error = None
        self._due = float("-inf")

    def report(self, own: ControlStatus, *, leaving: bool = False) -> NodeReport:
        """Return a report; a node that leaves sends its last one."""
        return NodeReport(
            incarnation=self._incarnation,
            engines=self._own(own),
            assigned=self._assigned,
            request=self._request,
            leaving=leaving,
            protocol=self._protocol,
            version=SWELL_VERSION,
            group=self._group,
        )

    def _own(self, own: ControlStatus) -> NodeEngines:
        return NodeEngines(
            self._name, own.data_parallel_size, self._capacity, own.engines, own.busy, own.error
        )

    def _status(self, own: ControlStatus, error: str | None) -> ControlStatus:
        nodes = [self._own(own)]
        if self._order is not None:
            # The local state is newer than the coordinator's copy.
            index = self._order.recipient
            nodes = [*self._order.nodes[:index], *nodes, *self._order.nodes[index + 1 :]]
        names: Counter[str] = Counter()
        for at, node in enumerate(nodes):  # number the supervisors that share a name
            names[node.name] += 1
            if (number := names[node.name]) > 1:
                nodes[at] = msgspec.structs.replace(node, name=f"{node.name}#{number}")
        if error is None:
            failed = [f"{node.name}: {node.error}" for node in nodes if node.error is not None]
            error = "; ".join(failed) or None
        size = sum(node.target for node in nodes)
        if self._request is not None and self._request.size is not None:
            size = self._request.size
        return ControlStatus(
            data_parallel_size=size,
            engines={
                f"{node.name}/{number}": phase
                for node in nodes
                for number, phase in node.phases.items()
            },
            busy=self._request is not None
            or own.busy
            or (self._order is not None and self._order.busy),
            error=error,
            nodes=nodes,
        )


class NodeLink:
    """Reports the node's engines, and applies the coordinator's assignments to its scaler."""

    def __init__(
        self, scaler: EngineScaler, capacity: int, cluster: ClusterConfig, transport: Transport
    ) -> None:
        """Connect.

        Args:
            capacity: maximum number of engines of the node.

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
        """Forward an operator's request; return the state of all nodes without waiting."""
        status = self._scaling.handle(request, self._scaler.status)
        self._report()
        return status

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._report()
            await asyncio.sleep(_POLL_INTERVAL)

    def _report(self) -> None:
        report = self._scaling.tick(self._scaler.status, time.monotonic())
        if report is not None:
            self._orders.send(encode(report))

    def _receive(self, _sender: bytes, order: NodeOrder | Refused) -> None:
        if isinstance(order, Refused):
            self._scaling.refused(order)
            return
        assignment = self._scaling.receive(order)
        if assignment is not None:
            self._scaler.assign(assignment.target, restart=assignment.restart)
            self._report()

    def close(self) -> None:
        """Report that the node leaves, and close the socket."""
        self._orders.send(encode(self._scaling.report(self._scaler.status, leaving=True)))
        self._orders.close(linger_ms=200)
