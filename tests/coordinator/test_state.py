"""The coordinator's decisions, as events in and actions out."""

from dataclasses import replace

import pytest

from coordinator.events import (
    Action,
    FromMember,
    Notice,
    PublishOrder,
    PublishView,
    Reply,
    Subscribed,
    Tick,
)
from coordinator.state import MISSING_INTERVAL, CoordinatorParameters, CoordinatorState
from engine.shared.messages import (
    PUSHED,
    Draining,
    EngineSetup,
    EngineStats,
    FleetRequest,
    FormGroup,
    FrontEndAddresses,
    FrontEnds,
    Goodbye,
    GroupStatus,
    Heartbeat,
    Hello,
    Ready,
    Refused,
    StartDpWave,
    StartWave,
    WakeUp,
    WeightsSource,
    Welcome,
)
from engine.shared.scope import EVERYTHING, Scope
from engine.shared.version import PROTOCOL_VERSION

EPOCH = 7
PARAMETERS = CoordinatorParameters(
    epoch=EPOCH,
    front_publish="ipc://front",
    back_publish="ipc://back",
    back_output="ipc://output",
    publish_interval=0.1,
    publish_idle_interval=3.0,
    member_timeout=5.0,
)
SETUP = EngineSetup(num_kv_blocks=100, block_size=16, max_model_len=512, model_fingerprint="abc")


class Cluster:
    """A coordinator state with a clock of its own."""

    def __init__(self, parameters: CoordinatorParameters = PARAMETERS) -> None:
        self.now = 100.0
        self.state = CoordinatorState(parameters)

    def send(self, event: object, after: float = 0.0) -> list[Action]:
        self.now += after
        return self.state.handle(event, self.now)  # type: ignore[arg-type]

    def hello(self, rank: int, incarnation: int, **changes: object) -> list[Action]:
        fields = {
            "kind": "engine", "index": rank, "incarnation": incarnation, "host": "h", "pid": 1,
            "group_config": {"dtype": "float32"}, "protocol": PROTOCOL_VERSION, **changes,
        }  # fmt: skip
        return self.send(FromMember(b"e%d" % incarnation, Hello(**fields)))  # type: ignore[arg-type]

    def ready(self, rank: int, incarnation: int, setup: EngineSetup = SETUP) -> list[Action]:
        return self.send(FromMember(b"e", Ready("engine", rank, incarnation, setup)))

    def engine(self, rank: int, incarnation: int) -> None:
        self.hello(rank, incarnation)
        self.ready(rank, incarnation)

    def front_end(
        self, index: int, incarnation: int, scope: Scope = EVERYTHING, *, takes_changes: bool = True
    ) -> list[Action]:
        addresses = FrontEndAddresses(f"ipc://r{incarnation}", f"ipc://o{incarnation}")
        hello = Hello(
            "front_end",
            index,
            incarnation,
            "h",
            1,
            {},
            addresses,
            scope=scope,
            protocol=PROTOCOL_VERSION,
            takes_changes=takes_changes,
        )
        return self.send(FromMember(b"f", hello))

    def stats(self, rank: int, incarnation: int, version: int, running: int) -> list[Action]:
        return self.send(
            EngineStats(
                rank=rank, incarnation=incarnation, version=version, wave=0, step=version,
                waiting=0, running=running, kv_usage=0.0, queued_prefill_tokens=0,
            )
        )  # fmt: skip


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def only(actions: list[Action], kind: type) -> list:  # type: ignore[type-arg]
    return [action for action in actions if isinstance(action, kind)]


def reply(actions: list[Action]) -> object:
    (found,) = only(actions, Reply)
    return found.message


def test_an_engine_is_welcomed_with_the_addresses_and_all_front_ends(cluster: Cluster) -> None:
    cluster.front_end(0, 50)
    welcome = reply(cluster.hello(1, 10))
    assert isinstance(welcome, Welcome)
    assert (welcome.index, welcome.epoch) == (1, EPOCH)
    assert (welcome.publish_address, welcome.output_address) == ("ipc://back", "ipc://output")
    assert [entry.incarnation for entry in welcome.front_ends] == [50]


def test_an_engine_without_a_rank_gets_the_lowest_free_one_and_keeps_it(cluster: Cluster) -> None:
    cluster.send(Tick())
    cluster.now += 5.0
    cluster.hello(0, 10)
    cluster.hello(2, 12)
    assert reply(cluster.hello(-1, 11)).index == 1  # type: ignore[attr-defined]
    assert reply(cluster.hello(-1, 11)).index == 1  # type: ignore[attr-defined]


def test_orders_to_planned_engines_that_have_not_joined_are_repeated() -> None:
    cluster = Cluster(replace(PARAMETERS, planned_engines=2))
    cluster.engine(0, 10)

    def told(after: float) -> list[Notice]:
        return only(cluster.send(Tick(), after), Notice)

    missing = "1 of 2 engines are present: 0 on h. Missing: 1 (not joined, for {:.0f} s)"
    assert told(0.0) == [Notice(missing.format(0.0))]
    assert told(1.0) == []
    assert told(MISSING_INTERVAL) == [Notice(missing.format(1 + MISSING_INTERVAL))]


def test_engine_with_other_weights_is_removed(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.hello(1, 11)
    other = EngineSetup(
        num_kv_blocks=100, block_size=16, max_model_len=512, model_fingerprint="xyz"
    )
    refused = only(cluster.ready(1, 11, other), Reply)[-1].message
    assert refused.field == "model_fingerprint"
    assert [entry.rank for entry in cluster.state.view().engines] == [0]


def test_engine_can_wait_for_weights_sent_by_trainer(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.send(FleetRequest(1, "weights", weights=WeightsSource(PUSHED, None, "400")))
    cluster.hello(1, 11)
    other = EngineSetup(
        num_kv_blocks=100, block_size=16, max_model_len=512, model_fingerprint="xyz"
    )
    cluster.ready(1, 11, other)
    assert [entry.rank for entry in cluster.state.view().engines] == [0, 1]


def test_an_assigned_rank_is_refused_until_its_member_has_left(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    refused = reply(cluster.hello(0, 11))
    assert isinstance(refused, Refused)
    assert not refused.final
    cluster.send(FromMember(b"s", Goodbye("engine", 0, 10)))
    assert isinstance(reply(cluster.hello(0, 11)), Welcome)
    assert cluster.state.view().engines[0].restarts == 1


@pytest.mark.parametrize("kind", ["engine", "front_end"])
def test_newcomer_after_restart_does_not_get_number_of_living_member(
    cluster: Cluster, kind: str
) -> None:
    cluster.send(Tick())
    assert isinstance(reply(cluster.hello(-1, 11, kind=kind)), Refused)
    cluster.now += 2.0
    assert reply(cluster.hello(0, 10, kind=kind, given=True)).index == 0  # type: ignore[attr-defined]
    cluster.now += 3.0
    assert reply(cluster.hello(-1, 11, kind=kind)).index == 1  # type: ignore[attr-defined]


def test_a_member_whose_number_was_reassigned_is_ordered_to_exit(cluster: Cluster) -> None:
    cluster.send(Tick())
    cluster.hello(0, 10)
    for _ in range(6):  # it is silent for too long
        cluster.send(Tick(), after=1.0)
    assert reply(cluster.hello(-1, 11)).index == 0  # type: ignore[attr-defined]
    refused = reply(cluster.hello(0, 10, given=True))
    assert isinstance(refused, Refused)
    assert (refused.final, refused.field) == (True, "index")


def test_a_late_goodbye_of_a_predecessor_does_not_remove_its_successor(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.send(FromMember(b"s", Goodbye("engine", 0, 10)))
    cluster.engine(0, 11)
    cluster.send(FromMember(b"s", Goodbye("engine", 0, 10)))
    assert [entry.incarnation for entry in cluster.state.view().engines] == [11]


def test_a_silent_member_is_dropped_and_published_at_once(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.send(Tick(), after=4.9)
    assert cluster.state.view().engines
    (published,) = only(cluster.send(Tick(), after=0.2), PublishView)
    assert published.view.engines == []


def test_stalled_coordinator_considers_no_member_silent(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.send(Tick(), after=1.0)
    assert not only(cluster.send(Tick(), after=60.0), Notice)
    assert cluster.state.view().engines
    for _ in range(4):
        cluster.send(Tick(), after=1.2)
    assert cluster.state.view().engines
    assert only(cluster.send(Tick(), after=1.2), Notice)
    assert not cluster.state.view().engines


def test_an_engine_that_was_only_silent_does_not_count_as_restarted(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.send(Tick(), after=6)
    assert not cluster.state.view().engines
    cluster.engine(0, 10)
    assert cluster.state.view().engines[0].restarts == 0


def test_engines_are_notified_of_front_ends_joining_and_leaving(cluster: Cluster) -> None:
    (order,) = only(cluster.front_end(0, 50), PublishOrder)
    assert [entry.index for entry in order.order.front_ends] == [0]
    (order,) = only(cluster.send(FromMember(b"f", Goodbye("front_end", 0, 50))), PublishOrder)
    assert order.order == FrontEnds(EPOCH, [])


def test_stats_are_published_once_per_interval(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.stats(0, 10, 1, running=1)
    published = []
    for version in range(2, 52):
        cluster.now += 0.01
        published += only(cluster.stats(0, 10, version, running=version), PublishView)
    assert 4 <= len(published) <= 6


def test_stats_alone_are_not_published_to_front_ends_that_serve_one_engine_each(
    cluster: Cluster,
) -> None:
    cluster.engine(0, 10)
    (order,) = only(cluster.front_end(0, 50, Scope(rank=0)), PublishOrder)
    assert [entry.scope for entry in order.order.front_ends] == [Scope(rank=0)]
    (started,) = only(cluster.stats(0, 10, 1, running=1), PublishView)
    assert started.view.running
    published = []
    for version in range(2, 52):
        cluster.now += 0.01
        published += only(cluster.stats(0, 10, version, running=version), PublishView)
    assert not published
    (ended,) = only(cluster.stats(0, 10, 52, running=0), PublishView)
    assert not ended.view.running
    cluster.front_end(1, 51, Scope(node="a"))
    cluster.stats(0, 10, 53, running=1)
    assert only(cluster.stats(0, 10, 54, running=2), PublishView) == []
    assert only(cluster.send(Tick(), after=0.2), PublishView)


def test_an_unchanged_cluster_is_published_every_few_seconds(cluster: Cluster) -> None:
    cluster.send(Tick())
    assert not only(cluster.send(Tick(), after=2.9), PublishView)
    assert only(cluster.send(Tick(), after=0.2), PublishView)


def test_dead_engine_does_not_keep_wave_running(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.stats(0, 10, 1, running=3)
    cluster.send(FromMember(b"s", Goodbye("engine", 0, 10)))
    assert not cluster.state.view().running


def test_outdated_and_unknown_stats_are_ignored(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    cluster.stats(0, 10, 5, running=2)
    cluster.stats(0, 10, 4, running=9)
    cluster.stats(0, 77, 6, running=9)
    cluster.stats(3, 10, 6, running=9)
    assert [entry.stats.running for entry in cluster.state.view().engines if entry.stats] == [2]


def test_a_wake_up_notice_is_forwarded_while_paused_only(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    (order,) = only(cluster.send(WakeUp(0, 0, 0)), PublishOrder)
    assert order.order == StartDpWave(0, 0)
    assert not cluster.state.view().running, "only an engine's own report may say so"
    cluster.stats(0, 10, 1, running=1)
    assert not only(cluster.send(WakeUp(0, 0, 0)), PublishOrder)
    assert cluster.state.view().wakeups_total == {"front_end": 1, "engine": 0}


def test_an_engines_request_to_start_wakes_its_peers(cluster: Cluster) -> None:
    cluster.engine(0, 10)
    (order,) = only(cluster.send(StartWave(0, 10, 4)), PublishOrder)
    assert order.order == StartDpWave(4, 0)


def test_wave_is_adopted_from_members_and_never_decreases(cluster: Cluster) -> None:
    cluster.hello(0, 10, wave=41)
    assert reply(cluster.hello(1, 11, wave=3)).wave == 41  # type: ignore[attr-defined]


def test_a_new_subscriber_is_served_at_once(cluster: Cluster) -> None:
    cluster.send(Tick())
    assert only(cluster.send(Subscribed("front_end")), PublishView)
    (order,) = only(cluster.send(Subscribed("engine")), PublishOrder)
    assert order.order == FrontEnds(EPOCH, [])


# -- lockstep groups -------------------------------------------------------------------------------

TOGETHER = {"lockstep": "true", "data_parallel_size": "2", "regroup": "wait"}


def plans(actions: list[Action]) -> list[tuple[int, list[int], str]]:
    return [
        (a.order.topology, [member.rank for member in a.order.members], a.order.address)
        for a in actions
        if isinstance(a, PublishOrder) and isinstance(a.order, FormGroup)
    ]


def sits(cluster: Cluster, rank: int, state: str, topology: int = 0) -> list[Action]:
    group_status = GroupStatus(state, topology, f"host:{rank}")  # type: ignore[arg-type]
    return cluster.send(
        FromMember(b"e", Heartbeat("engine", rank, rank + 10, group_status)), after=1.0
    )


def test_engines_that_step_together_are_put_into_a_group(cluster: Cluster) -> None:
    for rank in (0, 1):
        cluster.hello(rank, rank + 10, group_config=TOGETHER)
    assert plans(sits(cluster, 0, "apart")) == []
    assert plans(sits(cluster, 1, "apart")) == [(1, [0, 1], "")]
    assert plans(sits(cluster, 1, "prepared", 1)) == [(1, [0, 1], "")]
    assert plans(sits(cluster, 0, "prepared", 1)) == [(1, [0, 1], "host:0")]
    sits(cluster, 0, "joined", 1)
    assert plans(sits(cluster, 1, "joined", 1)) == []


def test_group_does_not_wait_for_drained_engine(cluster: Cluster) -> None:
    for rank in (0, 1):
        cluster.hello(rank, rank + 10, group_config=TOGETHER)
        sits(cluster, rank, "apart")
    for rank in (0, 1):
        sits(cluster, rank, "joined", 1)
    group_status = GroupStatus("joined", 1, "host:1")
    cluster.send(FromMember(b"e", Draining("engine", 1, 11, group_status)))
    assert plans(cluster.send(FromMember(b"e", Goodbye("engine", 1, 11)))) == [(2, [0], "")]


def test_invalid_group_size_is_refused(cluster: Cluster) -> None:
    refused = reply(cluster.hello(0, 10, group_config={**TOGETHER, "data_parallel_size": "two"}))
    assert isinstance(refused, Refused)
    assert (refused.field, refused.final) == ("data_parallel_size", True)


def test_front_ends_that_have_a_view_get_its_changes(cluster: Cluster) -> None:
    cluster.front_end(0, 50)
    for rank in range(3):
        cluster.engine(rank, 10 + rank)
    cluster.send(Subscribed("front_end"))
    (published,) = only(cluster.stats(1, 11, 1, running=2), PublishView)
    change = published.change
    assert change is not None
    assert published.message is change
    assert change.after == published.view.version - 1
    assert [each.rank for each in change.view.engines] == [1]
    (published,) = only(
        cluster.send(FromMember(b"e", Goodbye("engine", 2, 12)), after=0.2), PublishView
    )
    assert published.change.left == [2]
    assert published.change.processes_left == ["engine 2"]


def test_newcomers_and_older_front_ends_get_full_views(cluster: Cluster) -> None:
    cluster.front_end(0, 50)
    cluster.engine(0, 10)
    (published,) = only(cluster.send(Subscribed("front_end")), PublishView)
    assert published.message is published.view
    assert only(cluster.stats(0, 10, 1, running=2), PublishView)[0].change is not None
    cluster.front_end(1, 51, takes_changes=False)
    (published,) = only(cluster.stats(0, 10, 2, running=0), PublishView)
    assert published.message is published.view
    cluster.send(FromMember(b"f", Goodbye("front_end", 1, 51)))
    assert only(cluster.stats(0, 10, 3, running=2), PublishView)[0].change is not None


def test_many_joins_are_published_together(cluster: Cluster) -> None:
    cluster.front_end(0, 50)
    published = []
    for rank in range(300):
        cluster.now += 0.001
        cluster.hello(rank, 1000 + rank)
        published += only(cluster.ready(rank, 1000 + rank), PublishView)
    assert len(published) < 45
    published += only(cluster.send(Tick(), after=0.1), PublishView)
    assert len(published[-1].view.engines) == 300
    assert published[-1].change is not None
