"""An engine's receiver handling arbitrary messages, without its sockets."""

from typing import cast

import pytest
from msgspec.structs import replace

from engine.core.events import FrontEndJoined, FrontEndLeft, Rejoined, Stop, Welcomed
from engine.process.reception import (
    Announce,
    Close,
    Connect,
    Deliver,
    Disconnect,
    Event,
    Follow,
    FrontEndLinks,
    Leave,
    Reception,
    Register,
    SendHello,
    Serve,
    SetAdapters,
    SetGroupStatus,
    StartDrain,
    Supersede,
    Tick,
)
from engine.shared.membership import HELLO_INTERVAL, Membership
from engine.shared.messages import (
    AbortRequests,
    AdapterEntry,
    AdapterLoadResult,
    AdapterTable,
    ApplyAdapterTable,
    Draining,
    EngineSetup,
    FormGroup,
    FrontEndAddresses,
    FrontEndEntry,
    FrontEnds,
    Goodbye,
    GroupStatus,
    HeartbeatAck,
    Hello,
    Ready,
    Refused,
    RouteHello,
    RouteTaken,
    StartDpWave,
    Welcome,
)
from engine.shared.version import PROTOCOL_VERSION

INCARNATION, RANK, EPOCH = 77, 3, 9
SETUP = EngineSetup(num_kv_blocks=9, block_size=16, max_model_len=64, model_fingerprint="f")
HEARTBEAT, GRACE = 1.0, 5.0


def entry(index: int) -> FrontEndEntry:
    return FrontEndEntry(index, 100 + index, FrontEndAddresses("requests", "outputs"))


def welcome(*front_ends: FrontEndEntry, epoch: int = EPOCH, at: str = "publish") -> Welcome:
    return Welcome(
        epoch=epoch, index=RANK, wave=5, publish_address=at, output_address="reports",
        front_ends=list(front_ends), protocol=PROTOCOL_VERSION,
    )  # fmt: skip


def new_reception() -> Reception:
    identity = Hello(
        kind="engine", index=-1, incarnation=INCARNATION, host="node", pid=1, group_config={}
    )
    links = FrontEndLinks(INCARNATION, "node", GRACE, HEARTBEAT)
    return Reception(Membership(identity, HEARTBEAT), links)


@pytest.fixture
def joined() -> Reception:
    """A member with one front end that has been greeted, at time 0."""
    reception = new_reception()
    reception.handle(welcome(entry(0)), 0.0)
    return reception


def test_welcomed_engine_subscribes_and_connects_before_hellos() -> None:
    reception = new_reception()
    actions = reception.handle(welcome(entry(0)), 0.0)
    assert actions[:5] == [
        Follow("publish", "reports"),
        Deliver(Welcomed(RANK, 5)),
        Connect(entry(0)),
        Deliver(FrontEndJoined(0, 100)),
        SendHello(0, RouteHello(RANK, INCARNATION, 1)),
    ]
    assert reception.rank == RANK


def test_an_engine_that_is_refused_for_good_stops() -> None:
    reception = new_reception()
    assert reception.handle(Refused("not yet"), 0.0) != [Deliver(Stop("not yet"))]
    stop, *_ = reception.handle(Refused("wrong model", final=True), 0.1)
    assert stop == Deliver(Stop("the coordinator refused this engine: wrong model"))


def test_serving_engine_continues_if_restarted_coordinator_refuses_it(
    joined: Reception,
) -> None:
    joined.handle(Serve(SETUP), 0.1)
    joined.handle(HeartbeatAck(known=False, epoch=EPOCH + 1), 1.0)
    for at in (1.1, 1.2):
        actions = joined.handle(Refused("dtype differs", field="dtype"), at)
        assert not any(isinstance(each, Deliver | Disconnect) for each in actions)
    again = joined.handle(Tick(), 1.1 + HELLO_INTERVAL)
    assert any(isinstance(each, Register) and isinstance(each.message, Hello) for each in again)
    assert Deliver(Rejoined(5)) in joined.handle(welcome(entry(0), epoch=EPOCH + 2), 3.0)


@pytest.mark.parametrize(("at", "follows"), [("publish", False), ("elsewhere", True)])
def test_restarted_coordinator_is_followed_at_its_new_address(
    joined: Reception, at: str, follows: bool
) -> None:
    (hello, *_) = joined.handle(HeartbeatAck(known=False, epoch=EPOCH + 1), 1.0)
    assert isinstance(hello, Register)
    assert isinstance(hello.message, Hello)
    actions = joined.handle(welcome(entry(0), epoch=EPOCH + 1, at=at), 1.1)
    assert (Follow(at, "reports") in actions) == follows
    assert Deliver(Rejoined(5)) in actions
    assert not any(isinstance(each, Connect) for each in actions), "it is connected already"


def test_lists_of_another_coordinator_are_ignored(joined: Reception) -> None:
    assert Connect(entry(1)) not in joined.handle(FrontEnds(EPOCH - 1, [entry(1)]), 0.1)
    actions = joined.handle(FrontEnds(EPOCH, [entry(1)]), 0.2)
    assert actions[:4] == [
        Disconnect(0),
        Deliver(FrontEndLeft(0)),
        Connect(entry(1)),
        Deliver(FrontEndJoined(1, 101)),
    ]


def test_decisions_of_the_loop_are_reported_immediately(joined: Reception) -> None:
    joined.handle(Tick(), 0.5)
    (register, *_) = joined.handle(Serve(SETUP), 0.6)
    assert register == Register(Ready("engine", RANK, INCARNATION, SETUP, None))
    status = GroupStatus("apart", 0, "here")
    (register, *_) = joined.handle(SetGroupStatus(status), 0.61)
    assert register == Register(Ready("engine", RANK, INCARNATION, SETUP, status))
    register, *others = joined.handle(StartDrain(), 0.62)
    assert register == Register(Draining("engine", RANK, INCARNATION, status))
    assert SendHello(0, RouteHello(RANK, INCARNATION, 1, wants_reply=True, drains=True)) in others
    assert joined.handle(Leave(), 0.63) == [
        Register(Goodbye("engine", RANK, INCARNATION)),
        Close(),
    ]


def test_an_engine_is_announced_once_its_front_ends_route_to_it(joined: Reception) -> None:
    asking = joined.handle(Serve(SETUP), 1.0)
    assert SendHello(0, RouteHello(RANK, INCARNATION, 1, wants_reply=True)) in asking
    assert joined.handle(RouteTaken(session=1), 1.01) == [Announce([])]
    assert Announce([]) not in joined.handle(Tick(), 1.1), "it is said once"


def test_an_engine_is_announced_after_the_grace_period_even_without_all_answers(
    joined: Reception,
) -> None:
    joined.handle(Serve(SETUP), 1.0)
    assert Announce([0]) in joined.handle(Tick(), 1.0 + GRACE)


def test_requests_and_orders_go_to_the_loop(joined: Reception) -> None:
    for message in (AbortRequests([1]), StartDpWave(6, -1)):
        assert joined.handle(message, 0.1) == [Deliver(message)]
    order = FormGroup(4, [])
    assert joined.handle(order, 0.1) == [Supersede(4), Deliver(order)], "whoever waits is freed"


def test_a_restarted_coordinator_learns_the_newest_wave(joined: Reception) -> None:
    joined.note_wave(12)
    joined.note_wave(11)
    (hello, *_) = joined.handle(HeartbeatAck(known=False, epoch=EPOCH), 1.0)
    assert isinstance(hello, Register)
    assert isinstance(hello.message, Hello)
    assert hello.message.wave == 12


def test_unknown_events_are_ignored(joined: Reception, caplog: pytest.LogCaptureFixture) -> None:
    assert joined.handle(cast("Event", object()), 0.1) == []
    assert "object ignored" in caplog.text


# -- adapters -------------------------------------------------------------------------------------


def adapter_table(revision: int) -> AdapterTable:
    return AdapterTable(revision, [AdapterEntry(1, "sql", "sql", "v1", "serving")])


def test_starting_engine_gets_newest_adapter_table() -> None:
    reception = new_reception()
    reception.handle(replace(welcome(), adapters=adapter_table(3)), 0.0)
    assert reception.adapter_table == adapter_table(3)
    newer = ApplyAdapterTable(EPOCH, adapter_table(5))
    assert Deliver(newer) in reception.handle(newer, 1.0)
    for order in (
        ApplyAdapterTable(EPOCH, adapter_table(4)),
        ApplyAdapterTable(EPOCH + 1, adapter_table(9)),
    ):
        reception.handle(order, 2.0)
    assert reception.adapter_table == adapter_table(5)
    other = ApplyAdapterTable(EPOCH, adapter_table(7), group="other")
    assert reception.handle(other, 3.0) == []


def test_an_engines_adapters_are_reported_immediately_and_to_a_restarted_coordinator() -> None:
    reception = new_reception()
    reception.handle(welcome(), 0.0)
    reception.handle(Serve(SETUP), 0.1)
    held = [AdapterLoadResult(1, "v1")]
    actions = reception.handle(SetAdapters(adapter_table(3), held), 0.2)
    (register,) = (each.message for each in actions if isinstance(each, Register))
    assert isinstance(register, Ready)
    assert register.adapters == held
    forgotten = reception.handle(HeartbeatAck(EPOCH + 1, known=False), 1.0)
    hellos = [each.message for each in forgotten if isinstance(each, Register)]
    assert [each.adapters for each in hellos if isinstance(each, Hello)] == [adapter_table(3)]
    again = reception.handle(replace(welcome(epoch=EPOCH + 1), adapters=adapter_table(6)), 1.1)
    assert Deliver(ApplyAdapterTable(EPOCH + 1, adapter_table(6))) in again
