"""Engine groups side by side behind one coordinator."""

import pytest

from coordinator import groups
from coordinator.events import Action, FromMember, PublishOrder, PublishView, Reply, Tick
from coordinator.groups import EngineGroups
from coordinator.state import CoordinatorParameters
from engine.shared.messages import (
    ClusterView,
    Draining,
    EngineSetup,
    EngineStats,
    FrontEndAddresses,
    FrontEnds,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MemberKind,
    MissingEngine,
    NodeEngines,
    NodeReport,
    ProcessEntry,
    ProcessUse,
    Ready,
    Refused,
    StartDpWave,
    WakeUp,
    Welcome,
)
from engine.shared.process_state import Descriptors
from engine.shared.version import PROTOCOL_VERSION

SETUP = EngineSetup(num_kv_blocks=100, block_size=16, max_model_len=512, model_fingerprint="abc")
TIMEOUT = 5.0
EPOCH = 7


class Cluster:
    """A coordinator of several groups; what it publishes last for each is kept."""

    def __init__(self, expected: dict[str, int] | None = None) -> None:
        self.now = 100.0
        self.groups = EngineGroups(
            CoordinatorParameters(
                epoch=EPOCH, front_publish="", back_publish="", back_output="",
                publish_interval=0.1, publish_idle_interval=3.0, member_timeout=TIMEOUT,
            ),
            (expected or {}).get,
        )  # fmt: skip
        self.views: dict[str, ClusterView] = {}
        self.front_ends: dict[str, list[int]] = {}

    def send(self, event: object, after: float = 0.0) -> list[Action]:
        self.now += after
        actions = self.groups.handle(event, self.now)  # type: ignore[arg-type]
        for action in actions:
            if isinstance(action, PublishView):
                self.views[action.view.group] = action.view
            elif isinstance(action, PublishOrder) and isinstance(action.order, FrontEnds):
                entries = action.order.front_ends
                self.front_ends[action.order.group] = [each.incarnation for each in entries]
        return actions

    def reply(self, message: object) -> object:
        actions = self.send(FromMember(b"x", message))  # type: ignore[arg-type]
        replies = [action.message for action in actions if isinstance(action, Reply)]
        return replies[0] if replies else None

    def join(self, kind: MemberKind, index: int, incarnation: int, model: str) -> object:
        addresses = FrontEndAddresses("r", "o") if kind == "front_end" else None
        settings = {"model": model, "revision": "default"}
        hello = Hello(
            kind, index, incarnation, "h", 1, settings, addresses, protocol=PROTOCOL_VERSION,
            group=model,
        )  # fmt: skip
        welcome = self.reply(hello)
        if kind == "engine":
            self.reply(Ready(kind, index, incarnation, SETUP))
        return welcome

    def ranks(self, group: str) -> dict[int, int]:
        return {entry.rank: entry.incarnation for entry in self.views[group].engines}


@pytest.fixture
def cluster() -> Cluster:
    """Models a and b: an engine of rank 0 and a front end of number 0 of each."""
    cluster = Cluster()
    for model, first in (("a", 10), ("b", 20)):
        assert isinstance(cluster.join("engine", 0, first, model), Welcome)
        assert isinstance(cluster.join("front_end", 0, first + 5, model), Welcome)
    cluster.send(Tick(), after=1.0)
    return cluster


def test_each_group_sees_its_own_engines_and_front_ends_under_the_same_numbers(
    cluster: Cluster,
) -> None:
    assert (cluster.ranks("a"), cluster.ranks("b")) == ({0: 10}, {0: 20})
    assert cluster.views["a"].engines[0].ready
    assert (cluster.front_ends["a"], cluster.front_ends["b"]) == ([15], [25])
    assert not cluster.views[""].engines


def test_settings_have_to_agree_only_within_a_group(cluster: Cluster) -> None:
    hello = Hello(
        "engine", 1, 30, "h", 1, {"model": "c", "revision": "default"}, group="b",
        protocol=PROTOCOL_VERSION,
    )  # fmt: skip
    refused = cluster.reply(hello)
    assert isinstance(refused, Refused)
    assert refused.field == "model"
    assert cluster.ranks("b") == {0: 20}


def test_stats_are_assigned_by_process_and_not_by_rank(cluster: Cluster) -> None:
    cluster.send(
        EngineStats(
            rank=0,
            incarnation=20,
            version=1,
            wave=0,
            step=1,
            waiting=0,
            running=3,
            kv_usage=0.0,
            queued_prefill_tokens=0,
        )
    )
    cluster.send(Tick(), after=1.0)
    (of_a,), (of_b,) = (cluster.views[group].engines for group in "ab")
    assert of_a.stats is None
    assert of_b.stats is not None
    assert of_b.stats.running == 3


def test_goodbye_and_wake_up_affect_one_group(cluster: Cluster) -> None:
    orders = [each.order for each in cluster.send(WakeUp(0, 0, 0, group="b"))
              if isinstance(each, PublishOrder)]  # fmt: skip
    assert orders == [StartDpWave(0, 0, group="b")]
    assert not cluster.send(WakeUp(0, 0, 0, group="unheard of"))
    cluster.reply(Goodbye("engine", -1, 10))
    assert (cluster.ranks("a"), cluster.ranks("b")) == ({}, {0: 20})


def test_unknown_member_has_to_register(cluster: Cluster) -> None:
    assert cluster.reply(Heartbeat("engine", 0, 99)) == HeartbeatAck(EPOCH, known=False)
    known = cluster.reply(Heartbeat("engine", 0, 20))
    assert isinstance(known, HeartbeatAck)
    assert known.known


def test_empty_group_is_forgotten_and_restarts_with_new_epoch(cluster: Cluster) -> None:
    last = cluster.views["a"]
    for _ in range(5):
        cluster.send(Tick(), after=TIMEOUT / 4)
    cluster.send(Tick())
    assert cluster.groups.names == [""]
    welcome = cluster.join("front_end", 0, 15, "a")
    assert isinstance(welcome, Welcome)
    assert welcome.epoch not in (last.epoch, EPOCH)
    assert cluster.views["a"].epoch == welcome.epoch


def test_nodes_report_expected_engines_of_their_group(cluster: Cluster) -> None:
    engines = NodeEngines("n", target=3, capacity=4, phases={}, busy=False)
    report = NodeReport(5, engines, 0, protocol=PROTOCOL_VERSION, group="b")
    cluster.send(FromMember(b"n", report))
    cluster.send(Tick(), after=3.5)
    assert cluster.views["b"].expected == 3
    assert [each.rank for each in cluster.views["b"].missing] == [1, 2]
    assert cluster.views["a"].expected == 1


@pytest.mark.parametrize(
    ("end", "reason"), [("goodbye", "died"), ("drain", "drained"), ("silence", "silent")]
)
def test_departed_engine_is_missing_with_reason(end: str, reason: str) -> None:
    cluster = Cluster({"a": 2})
    cluster.join("engine", 0, 10, "a")
    cluster.join("engine", 1, 11, "a")
    if end == "silence":
        cluster.send(FromMember(b"x", Heartbeat("engine", 0, 10)), after=TIMEOUT / 2)
        cluster.send(Tick(), after=TIMEOUT / 2 + 1)
    else:
        if end == "drain":
            cluster.reply(Draining("engine", 1, 11))
        cluster.reply(Goodbye("engine", 1, 11))
    (missing,) = cluster.views["a"].missing
    assert (missing.rank, missing.reason) == (1, reason)
    cluster.join("engine", 1, 12, "a")
    cluster.send(Tick(), after=0.2)
    assert cluster.views["a"].missing == []


def test_new_group_assigns_numbers_at_once_in_long_running_coordinator(
    cluster: Cluster,
) -> None:
    cluster.send(Tick(), after=TIMEOUT)
    welcome = cluster.join("engine", -1, 30, "c")
    assert isinstance(welcome, Welcome)
    assert welcome.index == 0


def test_number_of_groups_is_limited_and_refused_process_creates_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Hello("engine", 0, 40, "h", 1, {}, group="c", protocol=0)
    assert isinstance(cluster.reply(older), Refused)
    assert cluster.groups.names == ["", "a", "b"]
    monkeypatch.setattr(groups, "MAX_GROUPS", 3)
    refused = cluster.join("engine", 0, 40, "c")
    assert isinstance(refused, Refused)
    assert refused.field == "engine_group"


def test_views_list_every_process_of_their_group_and_the_coordinator(
    cluster: Cluster,
) -> None:
    use = ProcessUse(1.5, 1 << 20, 12, 1024, 99.0)
    own = ProcessEntry("coordinator", "head", "0.1.0", PROTOCOL_VERSION, use)
    cluster.groups.process = own
    cluster.reply(Ready("engine", 0, 10, SETUP, use=use))
    cluster.reply(Ready("engine", 0, 20, SETUP))  # an older one, which says nothing of that
    cluster.send(Tick(), after=4.0)
    assert cluster.views["a"].processes == [
        own,
        ProcessEntry("engine 0", "h", "", PROTOCOL_VERSION, use),
        ProcessEntry("api 0", "h", "", PROTOCOL_VERSION, None),
    ]
    assert [each.use for each in cluster.views["b"].processes] == [use, None, None], "not theirs"


def test_newcomers_are_refused_before_descriptors_run_out(
    cluster: Cluster,
) -> None:
    cluster.groups.descriptors = Descriptors(1000, 1024)
    refused = cluster.join("engine", 1, 30, "a")
    assert isinstance(refused, Refused)
    assert (refused.field, refused.final) == ("descriptors", False)
    assert "1000 of 1024 file descriptors" in refused.reason
    assert isinstance(cluster.join("engine", 0, 10, "a"), Welcome), "it is a member"
    cluster.send(Tick(), after=1.0)
    assert cluster.views["a"].descriptors == (1000, 1024)
    cluster.groups.descriptors = Descriptors(900, 1024)
    assert isinstance(cluster.join("engine", 1, 30, "a"), Welcome)


def test_expected_engines_can_change_while_coordinator_runs() -> None:
    expected = {"a": 2}
    cluster = Cluster(expected)
    for group in "ab":
        cluster.join("engine", 0, 10, group)
    cluster.send(Tick(), after=4.0)
    assert cluster.views["a"].missing == [MissingEngine(1, "not_joined", 4.0)]
    assert {name: cluster.views[name].expected for name in "ab"} == {"a": 2, "b": 1}
    expected["a"] = 5
    cluster.groups.reload_expected()
    cluster.send(Tick(), after=5.0)
    assert {name: cluster.views[name].expected for name in "ab"} == {"a": 5, "b": 1}
    assert len(cluster.views["a"].missing) == 4
