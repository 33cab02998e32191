"""Which node gets or gives up an engine, and who is told when."""

from itertools import pairwise

import pytest

from coordinator.events import Action, Reply
from coordinator.placement import Placement, Share, spread
from engine.shared.messages import NodeEngines, NodeOrder, NodeReport, Refused, ScalingRequest
from engine.shared.version import PROTOCOL_VERSION

TIMEOUT = 5.0
SETTLED = TIMEOUT + 1


@pytest.mark.parametrize(
    ("total", "shares", "targets"),
    [
        (4, [(2, 8), (0, 8)], [2, 2]),
        (4, [(1, 8), (1, 8)], [2, 2]),
        (5, [(1, 8), (1, 8)], [3, 2]),
        (5, [(2, 8), (2, 8), (0, 0)], [3, 2, 0]),
        (6, [(2, 2), (1, 8), (1, 8)], [2, 2, 2]),
        (2, [(2, 8), (2, 8)], [1, 1]),
        (1, [(2, 8), (2, 8)], [1, 0]),
        (3, [(2, 8), (2, 8)], [2, 1]),
        (3, [(3, 8), (0, 8)], [3, 0]),
    ],
)
def test_engines_are_spread_evenly_and_removed_from_newest_node_first(
    total: int, shares: list[tuple[int, int]], targets: list[int]
) -> None:
    assert spread(total, [Share(*share) for share in shares]) == targets


class Node:
    """A supervisor that does what it is told, unless it is stopped."""

    def __init__(self, name: str, engines: int, capacity: int = 8) -> None:
        self.incarnation = len(name) + sum(map(ord, name))
        self.name, self.engines, self.capacity = name, engines, capacity
        self.assigned = 0
        self.request: ScalingRequest | None = None
        self.busy = self.leaving = False
        self.replaced: list[str] = []
        self.order: NodeOrder | None = None
        self.refused: Refused | None = None

    def report(self, protocol: int = PROTOCOL_VERSION) -> NodeReport:
        phases = {str(number): "ready" for number in range(self.engines)}
        engines = NodeEngines(self.name, self.engines, self.capacity, phases, self.busy)
        return NodeReport(
            self.incarnation, engines, self.assigned, self.request, self.leaving, protocol
        )

    def take(self, order: object) -> None:
        if isinstance(order, Refused):
            self.refused = order
            return
        assert isinstance(order, NodeOrder)
        self.order = order
        if self.request is not None and order.acknowledged == self.request.number:
            self.request = None
        assignment = order.assignment
        if assignment is not None and assignment.number > self.assigned:
            self.assigned, self.engines = assignment.number, assignment.target
            self.busy |= assignment.restart


class Cluster:
    """A coordinator's placement and its nodes."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes
        self.now = 0.0
        self.restart_coordinator()

    def restart_coordinator(self) -> None:
        self.placement = Placement(TIMEOUT)
        self.settled = self.now + SETTLED

    def deliver(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Reply):
                node = next(n for n in self.nodes if n.name.encode() == action.to)
                node.take(action.message)

    def turn(self, *nodes: Node, after: float = 1.0) -> None:
        self.now += after
        for node in nodes or self.nodes:
            report = node.report()
            self.deliver(self.placement.report(node.name.encode(), report, self.now))
        self.deliver(self.placement.tick(self.now))

    def settle(self) -> None:
        while self.now < self.settled:
            self.turn()

    @property
    def engines(self) -> list[int]:
        return [node.engines for node in self.nodes]


def test_a_requested_size_is_spread_over_all_nodes_and_reduced_again() -> None:
    head, other = Node("head", 1), Node("other", 1)
    cluster = Cluster(head, other)
    cluster.settle()
    for number, (size, engines) in enumerate([(4, [2, 2]), (2, [1, 1]), (1, [1, 0])], start=1):
        head.request = ScalingRequest(number, size)
        cluster.turn()
        cluster.turn()
        assert cluster.engines == engines
        assert head.request is None
        assert head.order is not None
        assert not head.order.busy


def test_nodes_without_engines_forward_requests_and_get_no_engines() -> None:
    front, gpu = Node("front", 0, capacity=0), Node("gpu", 2)
    cluster = Cluster(front, gpu)
    cluster.settle()
    front.request = ScalingRequest(1, 3)
    cluster.turn()
    cluster.turn()
    assert cluster.engines == [0, 3]


def test_too_many_engines_for_nodes_are_refused_with_numbers() -> None:
    head, other = Node("head", 1, capacity=2), Node("other", 1, capacity=1)
    cluster = Cluster(head, other)
    cluster.settle()
    head.request = ScalingRequest(1, 4)
    cluster.turn()
    assert head.order is not None
    assert head.order.error == "the nodes have room for 3 engines, not 4"
    assert cluster.engines == [1, 1]
    assert head.request is None


def test_restarted_coordinator_waits_for_node_reports_before_deciding() -> None:
    head, other = Node("head", 2), Node("other", 2)
    cluster = Cluster(head, other)
    cluster.settle()
    cluster.restart_coordinator()
    head.request = ScalingRequest(1, 4)
    cluster.turn(head)
    assert cluster.engines == [2, 2], "the head alone would have got all four"
    cluster.settle()
    cluster.turn()
    assert cluster.engines == [2, 2]
    assert head.request is None


def test_a_request_that_a_dead_coordinator_had_sent_to_only_some_nodes_is_completed() -> None:
    head, other = Node("head", 1), Node("other", 1)
    cluster = Cluster(head, other)
    cluster.settle()
    head.request = ScalingRequest(1, 6)
    actions = cluster.placement.report(b"head", head.report(), cluster.now)
    cluster.deliver([each for each in actions if isinstance(each, Reply) and each.to == b"head"])
    assert cluster.engines == [3, 1]
    assert head.request is not None, "not all nodes have taken it"
    cluster.restart_coordinator()
    cluster.settle()
    cluster.turn()
    cluster.turn()
    assert cluster.engines == [3, 3]
    assert head.request is None
    assert head.assigned < other.assigned


def test_share_of_lost_node_is_not_moved_automatically() -> None:
    head, other = Node("head", 2), Node("other", 2)
    cluster = Cluster(head, other)
    cluster.settle()
    for _ in range(8):
        cluster.turn(head)
    assert head.order is not None
    assert [node.name for node in head.order.nodes] == ["head"]
    assert head.engines == 2
    other.leaving = True
    cluster.turn()
    assert [node.name for node in head.order.nodes] == ["head"]


def test_engines_are_replaced_node_by_node() -> None:
    nodes = Node("head", 2), Node("front", 0, capacity=0), Node("other", 2)
    cluster = Cluster(*nodes)
    cluster.settle()
    nodes[1].request = ScalingRequest(1, None)
    began: list[str] = []
    for _ in range(8):
        cluster.turn()
        replacing = [node for node in nodes if node.busy]
        assert len(replacing) <= 1
        for node in replacing:
            began.append(node.name)
            cluster.turn()
            node.busy = False
    assert began == ["head", "other"]
    assert nodes[1].request is None
    assert nodes[1].order is not None
    assert not nodes[1].order.busy


def test_node_of_other_protocol_is_refused_and_gets_no_orders() -> None:
    head = Node("head", 2)
    cluster = Cluster(head)
    cluster.deliver(cluster.placement.report(b"head", head.report(PROTOCOL_VERSION + 1), 0.0))
    assert head.refused is not None
    assert head.refused.field == "protocol"
    assert head.order is None


def test_assignment_numbers_increase_across_restarts() -> None:
    head, other = Node("head", 1), Node("other", 1)
    cluster = Cluster(head, other)
    numbers = []
    for request, size in enumerate((4, 2, 6), start=1):
        cluster.restart_coordinator()
        cluster.settle()
        head.request = ScalingRequest(request, size)
        cluster.turn()
        cluster.turn()
        assert sum(cluster.engines) == size
        numbers.append(head.assigned)
    assert all(before < after for before, after in pairwise(numbers))
