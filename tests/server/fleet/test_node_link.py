"""A supervisor's side of scaling several nodes."""

from engine.shared.messages import (
    Assignment,
    ControlQuery,
    ControlStatus,
    NodeEngines,
    NodeOrder,
    Refused,
    RestartEngines,
    ScaleEngines,
)
from engine.shared.version import PROTOCOL_VERSION
from server.fleet.node_link import NodeScaling

OWN = ControlStatus(2, {"0": "ready", "1": "ready"}, busy=False)


def scaling() -> NodeScaling:
    return NodeScaling("head", 7, capacity=4, interval=1.0)


def node(name: str, target: int) -> NodeEngines:
    return NodeEngines(name, target, 8, {str(i): "ready" for i in range(target)}, busy=False)


def test_reports_are_sent_when_due_and_on_changes() -> None:
    me = scaling()
    assert me.tick(OWN, 0.0) is not None
    assert me.tick(OWN, 0.5) is None
    changed = ControlStatus(2, {"0": "ready", "1": "starting"}, busy=False)
    assert me.tick(changed, 0.6) is not None
    assert me.tick(changed, 1.5) is None
    assert me.tick(changed, 1.6) is not None


def test_a_request_is_repeated_until_all_nodes_have_accepted_it() -> None:
    me = scaling()
    status = me.handle(ScaleEngines(5), OWN)
    assert (status.data_parallel_size, status.busy) == (5, True)
    first = me.tick(OWN, 0.0)
    again = me.tick(OWN, 1.0)
    assert first is not None
    assert again is not None
    assert first.request == again.request
    assert first.request is not None
    assert first.request.size == 5
    me.receive(NodeOrder([node("head", 3), node("other", 2)], recipient=0, busy=False))
    assert me.handle(ControlQuery(), OWN).busy
    heard = NodeOrder([node("head", 3), node("other", 2)], 0, False, None, first.request.number)
    me.receive(heard)
    status = me.handle(ControlQuery(), ControlStatus(3, dict(OWN.engines), busy=False))
    assert not status.busy
    assert status.data_parallel_size == 5
    report = me.tick(OWN, 2.0)
    assert report is not None
    assert report.request is None


def test_assignment_is_applied_once() -> None:
    me = scaling()
    order = NodeOrder([node("head", 2)], 0, True, Assignment(3, 4))
    assert me.receive(order) == Assignment(3, 4)
    assert me.receive(order) is None
    assert me.receive(NodeOrder([node("head", 2)], 0, True, Assignment(2, 1))) is None
    report = me.tick(OWN, 0.0)
    assert report is not None
    assert report.assigned == 3


def test_status_shows_every_node_and_its_errors() -> None:
    me = scaling()
    broken = NodeEngines("other", 1, 8, {"0": "loading"}, busy=True, error="no memory")
    me.receive(NodeOrder([broken, node("head", 1), node("other", 1)], recipient=1, busy=True))
    status = me.handle(ControlQuery(), OWN)
    assert [each.name for each in status.nodes] == ["other", "head", "other#2"]
    assert status.data_parallel_size == 4
    assert status.engines == {
        "other/0": "loading", "head/0": "ready", "head/1": "ready", "other#2/0": "ready",
    }  # fmt: skip
    assert status.error == "other: no memory"
    assert status.busy


def test_impossible_sizes_are_refused_immediately() -> None:
    me = scaling()
    for size in (0, 1025):
        assert f"not {size}" in str(me.handle(ScaleEngines(size), OWN).error)
    report = me.tick(OWN, 0.0)
    assert report is not None
    assert report.request is None


def test_refused_node_reports_refusal_instead_of_waiting() -> None:
    me = scaling()
    me.handle(RestartEngines(), OWN)
    me.refused(Refused("there are too many groups"))
    status = me.handle(ControlQuery(), OWN)
    assert not status.busy
    assert "there are too many groups" in str(status.error)


def test_a_node_reports_in_the_protocol_of_an_older_coordinator() -> None:
    me = scaling()
    refused = Refused("protocol is 4 there", field="protocol")
    reports = []
    for now in (0.0, 0.1, 0.2):
        report = me.tick(OWN, now)
        assert report is not None
        reports.append(report.protocol)
        me.refused(refused)
    assert reports == [PROTOCOL_VERSION, PROTOCOL_VERSION - 1, PROTOCOL_VERSION]
    assert "protocol is 4 there" in str(me.handle(ControlQuery(), OWN).error), "none is spoken"
