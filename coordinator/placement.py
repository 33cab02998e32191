"""Engines per node, expected engines and missing engines. No I/O.

Numbers change only when an operator requests it. Supervisors keep their assignments: a supervisor
that is lost takes its share with it, and a restarted coordinator learns all assignments from the
supervisors' reports. It decides nothing until they have had time to arrive.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.agreement import refused_by_protocol
from coordinator.events import Action, Notice, Reply
from engine.shared.messages import (
    AbsenceReason,
    Assignment,
    MissingEngine,
    NodeEngines,
    NodeOrder,
    NodeReport,
    ScalingRequest,
)

MAX_MISSING_AGE = 3600.0
"""Seconds for which a dead engine counts as missing when no number is expected."""


class Share(NamedTuple):
    """Number of engines that a node runs, and its capacity."""

    engines: int
    capacity: int


def spread(total: int, shares: Sequence[Share]) -> list[int]:
    """Return the engines per node for `total` engines; `total` must not exceed the capacities.

    Engines are added one by one to the node with the fewest, and removed from the node with the
    most; on a tie the first node gains one, and the last node loses one.
    """
    engines = [share.engines for share in shares]
    order = range(len(shares))
    while sum(engines) > total:
        engines[max(order, key=lambda node: (engines[node], node))] -= 1
    while sum(engines) < total:
        free = [node for node in order if engines[node] < shares[node].capacity]
        engines[min(free, key=lambda node: (engines[node], node))] += 1
    return engines


@dataclass(eq=False)
class _Node:
    sender: bytes
    engines: NodeEngines
    last_seen: float
    assigned: int = 0
    assignment: Assignment | None = None
    request: ScalingRequest | None = None
    """The newest request from this node, kept until all nodes have applied the outcome."""
    acknowledged: int = 0
    error: str | None = None

    @property
    def target(self) -> int:
        return self.engines.target if self.assignment is None else self.assignment.target

    @property
    def is_busy(self) -> bool:
        return self.engines.busy or self.assignment is not None


class Placement:
    """The nodes of a cluster and the number of engines assigned to each."""

    def __init__(self, timeout: float) -> None:
        """Treat supervisors that are silent for `timeout` seconds as gone."""
        self._timeout = timeout
        self._nodes: dict[int, _Node] = {}
        self._number = 0
        self._settled_at: float | None = None
        self._decided: set[int] = set()
        self._restarts: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether no node has reported."""
        return not self._nodes

    @property
    def total_target(self) -> int | None:
        """Requested number of engines over all nodes; None if no node can run any."""
        able = [node for node in self._nodes.values() if node.engines.capacity or node.target]
        return sum(node.target for node in able) if able else None

    def report(self, sender: bytes, report: NodeReport, now: float) -> list[Action]:
        """Record a supervisor's report at `now` (seconds, monotonic) and return the replies."""
        refusal = refused_by_protocol(report.protocol, report.version)
        if refusal is not None:
            return [Reply(sender, refusal)]
        if report.leaving:
            return self._remove(report.incarnation, "left")
        if self._settled_at is None:
            self._settled_at = now + self._timeout
        actions: list[Action] = []
        node = self._nodes.get(report.incarnation)
        if node is None:
            node = self._nodes[report.incarnation] = _Node(sender, report.engines, now)
            room = report.engines.capacity
            actions.append(Notice(f"node {report.engines.name} joined, room for {room} engines"))
        node.sender, node.engines, node.last_seen = sender, report.engines, now
        node.assigned = report.assigned
        self._number = max(self._number, report.assigned)
        if node.assignment is not None and node.assignment.number <= report.assigned:
            node.assignment = None
        if report.request is not None and report.request.number != node.acknowledged:
            node.request = report.request
        decided = self._proceed(now)
        if decided:
            return [*actions, *decided, *self._send_orders()]
        return [*actions, Reply(sender, self._order(node))]

    def tick(self, now: float) -> list[Action]:
        """Forget silent nodes, and continue with decisions that waited for them."""
        limit = now - self._timeout
        silent = [inc for inc, node in self._nodes.items() if node.last_seen < limit]
        actions: list[Action] = []
        for incarnation in silent:
            actions += self._remove(incarnation, "has been silent for too long")
        decided = self._proceed(now)
        return [*actions, *decided, *(self._send_orders() if decided else [])]

    def _remove(self, incarnation: int, why: str) -> list[Action]:
        node = self._nodes.pop(incarnation, None)
        if incarnation in self._restarts:
            self._restarts.remove(incarnation)
        return [] if node is None else [Notice(f"node {node.engines.name} {why}")]

    def _proceed(self, now: float) -> list[Action]:
        """Decide pending requests and restart the next node; return the log notices."""
        if self._settled_at is None or now < self._settled_at:
            return []
        actions: list[Action] = []
        for node in self._nodes.values():
            if node.request is not None and node.request.number not in self._decided:
                actions += self._decide(node, node.request)
        if self._restarts and not any(node.is_busy for node in self._nodes.values()):
            # One node at a time: the next starts once the previous one is done.
            node = self._nodes[self._restarts.pop(0)]
            self._number += 1
            node.assignment = Assignment(self._number, node.target, restart=True)
            actions.append(Notice(f"node {node.engines.name} replaces its engines"))
        if not self._restarts and not any(node.assignment for node in self._nodes.values()):
            for node in self._nodes.values():
                if node.request is not None:
                    node.acknowledged, node.request = node.request.number, None
            self._decided.clear()
        return actions

    def _decide(self, node: _Node, request: ScalingRequest) -> list[Action]:
        self._decided.add(request.number)
        node.error = None
        if request.size is None:
            self._restarts = [inc for inc, each in self._nodes.items() if each.target]
            return [Notice("replacing all engines, node by node")]
        nodes = list(self._nodes.values())
        room = sum(max(each.engines.capacity, each.target) for each in nodes)
        if not room or request.size > room:
            node.error = (
                f"the nodes have room for {room} engines, not {request.size}"
                if room
                else "no supervisor here runs engines: scale with the tool that started them"
            )
            return [Notice(f"cannot scale to {request.size}: {node.error}")]
        shares = [Share(each.target, each.engines.capacity) for each in nodes]
        targets = spread(request.size, shares)
        self._number += 1
        for each, target in zip(nodes, targets, strict=True):
            if target != each.target:
                restart = each.assignment is not None and each.assignment.restart
                each.assignment = Assignment(self._number, target, restart)
        parts = (
            f"{target} on {each.engines.name}"
            for each, target in zip(nodes, targets, strict=True)
            if target or each.engines.capacity
        )
        return [Notice(f"the target is now {request.size} engines: {', '.join(parts)}")]

    def _send_orders(self) -> list[Action]:
        return [Reply(node.sender, self._order(node)) for node in self._nodes.values()]

    def _order(self, node: _Node) -> NodeOrder:
        return NodeOrder(
            nodes=[each.engines for each in self._nodes.values()],
            recipient=list(self._nodes.values()).index(node),
            busy=bool(self._restarts) or any(each.is_busy for each in self._nodes.values()),
            assignment=node.assignment,
            acknowledged=node.acknowledged,
            error=node.error,
        )


class ExpectedEngines:
    """The expected engines of one group.

    Engines that fall silent leave the view of the cluster, and those that die before they join, or
    wait for a machine, never enter it. So missing engines are tracked here: up to the configured or
    reported number; without a number, engines that ended unasked, until their ranks are reused.

    Args:
        number: number of expected engines, None if unknown.
        planned: number once all nodes have joined, if the head's settings specify it.
    """

    def __init__(self, number: int | None = None, planned: int | None = None) -> None:
        self.number = planned if number is None else number
        self.planned = planned
        self._reasons: dict[int, AbsenceReason] = {}
        self._since: dict[int, float] = {}

    def follow(self, target: int | None) -> None:
        """Follow the total that the joined nodes' supervisors run."""
        self.number = target if self.planned is None else max(self.planned, target or 0)

    def left(self, rank: int, reason: AbsenceReason) -> None:
        """Record why an engine left."""
        self._reasons[rank] = reason
        self._since.pop(rank, None)

    def missing(self, present: Collection[int], now: float) -> list[MissingEngine]:
        """Return the missing engines in rank order; `now` is in seconds, monotonic."""
        for rank in present:
            self._reasons.pop(rank, None)
        absent = self._absent(frozenset(present), now)
        self._since = {rank: self._since.get(rank, now) for rank in absent}
        return [
            MissingEngine(rank, self._reasons.get(rank, "not_joined"), now - self._since[rank])
            for rank in sorted(absent)
        ]

    def _absent(self, present: frozenset[int], now: float) -> list[int]:
        if self.number is None:
            for rank, reason in list(self._reasons.items()):
                if reason == "drained" or now - self._since.get(rank, now) > MAX_MISSING_AGE:
                    del self._reasons[rank]
            return list(self._reasons)
        short = max(0, self.number - len(present))
        # Ranks whose end is recorded come first, drained ones after others; then the lowest ranks.
        known = sorted(self._reasons, key=lambda rank: (self._reasons[rank] == "drained", rank))
        unseen = (rank for rank in range(self.number) if rank not in present)
        chosen = list(dict.fromkeys([*known, *unseen]))[:short]
        self._reasons = {rank: why for rank, why in self._reasons.items() if rank in chosen}
        return chosen
