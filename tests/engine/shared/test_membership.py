"""The registration handshake seen from a member."""

from collections.abc import Sequence

import msgspec

from engine.shared.membership import HELLO_INTERVAL, Joined, Membership, Rejected
from engine.shared.messages import (
    Draining,
    EngineSetup,
    GroupStatus,
    Heartbeat,
    HeartbeatAck,
    Hello,
    ProcessUse,
    Ready,
    Refused,
    Welcome,
)
from engine.shared.version import PROTOCOL_VERSION

ME = Hello(kind="engine", index=-1, incarnation=42, host="h", pid=1, group_config={})
SETUP = EngineSetup(num_kv_blocks=1, block_size=16, max_model_len=16, model_fingerprint="f")


def welcome(epoch: int, index: int = 3, wave: int = 0) -> Welcome:
    return Welcome(
        epoch=epoch,
        index=index,
        wave=wave,
        publish_address="p",
        output_address="o",
        protocol=PROTOCOL_VERSION,
    )


def kinds(messages: Sequence[object]) -> list[type]:
    return [type(message) for message in messages]


def test_a_coordinator_of_another_protocol_is_not_joined() -> None:
    for theirs, named in ((0, "older than 1"), (PROTOCOL_VERSION + 1, str(PROTOCOL_VERSION + 1))):
        member = Membership(ME, heartbeat_interval=1.0)
        event = member.receive(msgspec.structs.replace(welcome(epoch=1), protocol=theirs))
        assert isinstance(event, Rejected)
        assert f"protocol is {PROTOCOL_VERSION} here" in event.reason
        assert f"but {named} at the coordinator" in event.reason
        assert member.epoch is None


def protocol_of_hello(member: Membership) -> int:
    (hello,) = member.tick(0.0)
    assert isinstance(hello, Hello)
    return hello.protocol


def test_coordinator_of_previous_protocol_is_joined_with_it() -> None:
    me = msgspec.structs.replace(ME, group_config={"dtype": "f", "device": "cpu"})
    member = Membership(me, heartbeat_interval=1.0)
    refused = Refused("protocol is 4 there but 3 at the coordinator", field="protocol")
    assert protocol_of_hello(member) == PROTOCOL_VERSION
    assert member.receive(refused) is None
    (hello,) = member.tick(0.0)
    assert isinstance(hello, Hello)
    assert hello.protocol == PROTOCOL_VERSION - 1
    assert hello.group_config == {"dtype": "f"}, "no more than that protocol knows"
    older = msgspec.structs.replace(welcome(epoch=1), protocol=PROTOCOL_VERSION - 1)
    assert isinstance(member.receive(older), Joined)
    member.receive(HeartbeatAck(epoch=2, known=False))
    assert protocol_of_hello(member) == PROTOCOL_VERSION, "it may have been upgraded"


def test_repeated_refusal_does_not_hide_coordinator_protocol() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    refused = Refused("protocol", field="protocol")
    assert [member.receive(refused) for _ in range(2)] == [None, None]
    older = msgspec.structs.replace(welcome(epoch=1), protocol=PROTOCOL_VERSION - 1)
    assert isinstance(member.receive(older), Joined)


def test_coordinator_without_common_protocol_is_a_final_refusal() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    refused = Refused("protocol", field="protocol")
    events = [member.receive(refused) for _ in range(20)]
    assert Rejected("protocol") in events
    assert events[:3] == [None] * 3


def test_serving_member_continues_if_restarted_coordinator_refuses_it() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.receive(welcome(epoch=1))
    member.ready(SETUP)
    weights = Refused("the weights differ", field="model_fingerprint")
    assert member.receive(weights) == Rejected("the weights differ"), "of a member"
    member.receive(HeartbeatAck(epoch=2, known=False))
    refusal = Refused("dtype differs", field="dtype")
    assert member.receive(refusal) == Rejected("dtype differs", serving=True)
    assert kinds(member.tick(0.0)) == [Hello]
    assert isinstance(member.receive(welcome(epoch=2)), Joined)


def test_hello_is_repeated_until_answered() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    assert kinds(member.tick(0.0)) == [Hello]
    assert member.tick(HELLO_INTERVAL / 2) == []
    assert kinds(member.tick(HELLO_INTERVAL)) == [Hello]
    event = member.receive(welcome(epoch=1))
    assert isinstance(event, Joined)
    assert not event.again
    assert member.index == 3
    assert kinds(member.tick(0.6)) == [Heartbeat]
    assert member.tick(1.5) == []
    assert kinds(member.tick(1.6)) == [Heartbeat]


def test_ready_is_sent_immediately_and_repeated_as_heartbeat() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.tick(0.0)
    member.receive(welcome(epoch=1))
    member.tick(0.1)
    member.ready(SETUP)
    assert member.tick(0.2) == [Ready("engine", 3, 42, SETUP)]
    assert member.tick(1.3) == [Ready("engine", 3, 42, SETUP)]


def test_a_coordinator_that_does_not_know_the_member_gets_everything_again() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.tick(0.0)
    member.receive(welcome(epoch=1, wave=5))
    member.ready(SETUP)
    member.tick(0.1)
    member.receive(HeartbeatAck(epoch=2, known=False))
    (hello,) = member.tick(0.2)
    assert isinstance(hello, Hello)
    assert (hello.index, hello.wave) == (3, 5)
    event = member.receive(welcome(epoch=2))
    assert isinstance(event, Joined)
    assert event.again
    assert kinds(member.tick(0.3)) == [Ready]


def test_repeated_welcome_causes_no_second_event() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.tick(0.0)
    assert member.receive(welcome(epoch=1)) is not None
    assert member.receive(welcome(epoch=1)) is None


def test_only_a_final_refusal_ends_the_attempt() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.tick(0.0)
    assert member.receive(Refused("held", final=False)) is None
    assert kinds(member.tick(HELLO_INTERVAL)) == [Hello]
    assert member.receive(Refused("dtype differs")) == Rejected("dtype differs")


def test_member_learns_that_its_assigned_number_is_taken() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    (hello,) = member.tick(0.0)
    assert isinstance(hello, Hello)
    assert (hello.index, hello.given) == (-1, False)
    refused = Refused("wait", field="index")
    assert member.receive(refused) == Rejected("wait")
    member.receive(welcome(epoch=1))
    member.receive(HeartbeatAck(epoch=2, known=False))
    (hello,) = member.tick(0.2)
    assert isinstance(hello, Hello)
    assert (hello.index, hello.given) == (3, True)
    assert member.receive(refused) == Rejected("wait", replaced=True)


def test_group_status_is_reported_immediately_and_in_every_heartbeat() -> None:
    member = Membership(ME, heartbeat_interval=1.0)
    member.tick(0.0)
    member.receive(welcome(epoch=1))
    member.tick(0.1)
    apart, joined = GroupStatus("apart", 0, "h:1"), GroupStatus("joined", 1, "h:1")
    member.set_group_status(apart)
    assert member.tick(0.2) == [Heartbeat("engine", 3, 42, apart)]
    member.set_group_status(joined)
    member.ready(SETUP)
    assert member.tick(0.3) == [Ready("engine", 3, 42, SETUP, joined)]
    member.receive(HeartbeatAck(epoch=2, known=False))
    member.tick(0.4)
    member.receive(welcome(epoch=2))
    assert member.tick(0.5) == [Ready("engine", 3, 42, SETUP, joined)]


def test_every_heartbeat_reports_resource_usage() -> None:
    uses = iter([ProcessUse(0.5, 100, 7, 1024, 99.0), ProcessUse(1.5, 200, 8, 1024, 99.0), None])
    member = Membership(ME, heartbeat_interval=1.0, use=lambda: next(uses))
    member.tick(0.0)  # it asks to join, which says nothing of that
    member.receive(welcome(epoch=1))
    (alive,) = member.tick(1.0)
    assert alive == Heartbeat("engine", 3, 42, use=ProcessUse(0.5, 100, 7, 1024, 99.0))
    member.ready(SETUP)
    (ready,) = member.tick(1.5)
    assert ready == Ready("engine", 3, 42, SETUP, use=ProcessUse(1.5, 200, 8, 1024, 99.0))
    member.drain()
    assert kinds(member.tick(2.0)) == [Draining]
