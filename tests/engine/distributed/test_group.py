"""Process groups: communication, termination and cleanup."""

import os
import socket
import sys
from typing import Any

import pytest

from engine.distributed.group import join_group
from engine.distributed.spec import GroupBroken, GroupSpec, open_listener
from engine.shared.addresses import address_towards
from tests.engine.processes import Process, World, free_address
from tests.support.waiting import until

SHORT, LONG = 5.0, 200.0
"""Group timeouts in seconds: of members that others wait for, and of members that must
detect a failure well before it."""


def test_rows_of_all_ranks_arrive_in_rank_order(world: World) -> None:
    members = world.take(3)
    world.join(members)
    assert members[0].ask("begin_rows", [7, -1]) is False
    for rank in (1, 2):
        members[rank].tell("rows", [rank, 2**40])
    table = [[7, -1], [1, 2**40], [2, 2**40]]
    assert [members[rank].result() for rank in (1, 2)] == [table, table]
    assert members[0].ask("end_rows") == table
    world.all(members, "close")


@pytest.mark.skipif(sys.platform != "linux", reason="there are no batch threads")
def test_gloo_threads_do_not_preempt_others(world: World) -> None:
    members = world.take(2)
    world.join(members)
    for policies in world.all(members, "policies"):
        assert {p for name, p in policies if name == "gloo_tcp_loop"} == {os.SCHED_BATCH}
        assert os.SCHED_BATCH not in {p for name, p in policies if name != "gloo_tcp_loop"}
    world.all(members, "close")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
def test_uneven_and_empty_parts_reach_their_ranks(world: World, dtype: str) -> None:
    members = world.take(3)
    world.join(members)
    sent = [[1, 0, 2], [0, 0, 0], [3, 1, 0]]
    for rank, process in enumerate(members):
        process.tell("all_to_all", sent[rank], [row[rank] for row in sent], dtype)
    assert [process.result() for process in members] == [[0, 200, 201, 202], [203], [1, 2]]
    assert world.all(members, "all_gather", [2, 0, 1]) == [[0, 0, 2]] * 3
    assert world.all(members, "all_gather", [0, 0, 0]) == [[]] * 3
    assert world.all(members, "all_reduce", [1.5, -2.0]) == [[4.5, -6.0]] * 3
    assert world.all(members, "broadcast", [1.5, -2.0]) == [[1.5, -2.0]] * 3
    assert world.all(members, "all_gather_counts", 5) == [[5, 5, 5]] * 3
    for rank, process in enumerate(members):
        process.tell("all_gather_row", [rank, 9])
    assert [each.result() for each in members] == [[[0, 9], [1, 9], [2, 9]]] * 3
    for rank, process in enumerate(members):
        process.tell("all_to_all_counts", [10 * rank, 10 * rank + 1, 10 * rank + 2])
    assert [each.result() for each in members] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    world.all(members, "close")


def test_model_shards_exchange_tensors_on_their_devices(world: World) -> None:
    members = world.take(3)
    world.join(members)
    for together in (True, False):
        for rank, process in enumerate(members):
            process.tell("experts", 4 * rank, together)
        assert [process.result() for process in members] == [True] * 3
    for rank, process in enumerate(members):
        process.tell("balanced_experts", 2 * rank, 6)
    right, shares, imbalances, moved = zip(*(each.result() for each in members), strict=True)
    assert all(right)
    assert [share[:2] for share in shares] == [[0, 1]] * 3, "all have those that all choose"
    assert imbalances == (1.5,) * 3
    assert moved == (1,) * 3
    states = [[12.0, 13.0], [0.0, 1.0], [6.0, 7.0]]
    logits = [[x * 2 * i + y * (2 * i + 1) for i in range(7)] for x, y in states]
    answers = world.all(members, "vocabulary")
    assert answers == [[states, logits], [states, []], [states, []]]
    world.all(members, "close")


def test_tensors_on_wrong_device_are_refused(world: World) -> None:
    members = world.take(2)
    world.join(members)
    refused = world.all(members, "mixes")
    if members[0].ask("on_device"):
        assert refused == ["allreduce: Tensor over connections for OnDevice"] * 2
    else:
        assert refused == [""] * 2
    world.all(members, "close")


def test_states_pass_through_pipeline_stages_in_overlap(world: World) -> None:
    members, address = world.take(4), free_address()
    for rank, process in enumerate(members):
        process.tell("join_grid", address, rank, 2, 2)
    for process in members:
        process.result()
    first, second = [4.0, 6.0, 22.0, 42.0], [10.0, 14.0, 46.0, 86.0]
    assert world.all(members, "pass_on", 2, [1.0, 2.0]) == [first, first, second, second]
    members[0].ask("close_grid")
    members[2].tell("pass_on", 2, [1.0, 2.0])
    assert "lost the group" in members[2].answer()["broken"], "the stage before has left"
    for process in members[1:]:
        process.ask("close_grid")


def engines(world: World) -> list[Process]:
    """Return two engines of two processes each."""
    members, addresses = world.take(4), [free_address(), free_address()]
    for rank, process in enumerate(members):
        process.tell("join_engines", addresses, rank, 2, 2)
    for process in members:
        process.result()
    return members


def test_leaders_exchange_rows_and_all_processes_exchange_tokens(
    world: World,
) -> None:
    members = engines(world)
    for rank in (0, 2):
        members[rank].tell("gather_leaders", [rank, 7])
    assert [members[rank].result() for rank in (0, 2)] == [[[0, 7], [2, 7]]] * 2
    for counts in ((3, 8), (1, 0), (0, 5)):
        for rank, process in enumerate(members):
            engine = rank // 2
            process.tell("sharded_experts", counts[engine], 10 * engine)
        assert [process.result() for process in members] == [True] * 4
    world.all(members, "close_engines")


def test_lost_process_leaves_processes_of_other_engine_in_same_state(
    world: World,
) -> None:
    members = engines(world)
    for process in members[:3]:
        process.tell("sharded_experts", 5, 0)
    world.kill(members[3])
    assert ["lost the group" in each.answer()["broken"] for each in members[:3]] == [True] * 3
    assert world.all(members[:2], "sum_of_shards") == [[2.0]] * 2, "they have not lost each other"
    assert "has ended" in _refusal(members[2], "sum_of_shards")
    world.all(members[:3], "close_engines")


def test_a_killed_member_breaks_the_group_at_once_for_all_others(world: World) -> None:
    members = world.take(4)
    world.join(members, LONG)
    for process in members[:3]:
        process.tell("rows", [1])
    world.kill(members[3])
    for process in members[:3]:
        answer = process.answer()
        assert "lost the group" in answer["broken"]
        assert answer["seconds"] < LONG / 2
    assert "has ended" in _refusal(members[0], "rows", [1])


def _refusal(process: Process, *request: Any) -> Any:
    process.tell(*request)
    return process.answer()["broken"]


def test_absent_member_breaks_group_after_timeout(world: World) -> None:
    members = world.take(3)
    world.join(members, SHORT, SHORT, LONG)
    for process in members[:2]:
        process.tell("all_reduce", [1.0])
    for process in members[:2]:
        answer = process.answer()
        assert "lost the group" in answer["broken"]
        assert answer["seconds"] < SHORT + LONG / 2
    # The others have closed their connections, so it does not wait for its own timeout.
    members[2].tell("all_reduce", [1.0])
    assert members[2].answer()["seconds"] < LONG / 2


def test_abort_in_one_thread_frees_the_waiting_one_and_the_peers(world: World) -> None:
    members = world.take(3)
    world.join(members, LONG)
    members[0].ask("abort_after", 0.2)
    for process in members[:2]:
        process.tell("rows", [1])
    for process in members[:2]:
        answer = process.answer()
        assert "lost the group" in answer["broken"]
        assert answer["seconds"] < LONG / 2


def test_groups_created_and_closed_in_one_process_leave_nothing(world: World) -> None:
    members = world.take(3)
    for process in members:
        if process.ask("has_group"):
            process.ask("close")
    world.join(members)
    world.all(members, "close")
    before = world.all(members, "left")
    for size in (2, 3, 2, 1, 3):
        world.join(members[:size])
        assert world.all(members[:size], "rows", [5]) == [[[5]] * size] * size
        world.all(members[:size], "close")

    def nothing_is_left() -> bool:
        # Parts of the first group may still have been shutting down when counted.
        now = world.all(members, "left")
        return all(
            number <= then
            for pair in zip(now, before, strict=True)
            for number, then in zip(*pair, strict=True)
        )

    until(nothing_is_left, "nothing is left")


def test_a_process_without_peers_gives_up_after_the_timeout() -> None:
    for rank in (0, 1):
        with open_listener("127.0.0.1") as unused:
            address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(GroupBroken, match=f"rank {rank} of 2 could not join.*topology 9"):
            join_group(GroupSpec(address, rank, 2, 9, timeout_s=0.5))


def test_a_group_of_one_needs_no_network() -> None:
    spec = GroupSpec("192.0.2.1:1", 0, 1, 3, timeout_s=1)
    listener = open_listener("127.0.0.1")
    group = join_group(spec, listener=listener)
    assert listener.fileno() == -1
    assert group.all_gather_rows([4, 5]).wait() == [[4, 5]]
    assert group.all_gather_counts(8) == [8]
    group.close()
    with pytest.raises(GroupBroken, match="topology 3 has ended"):
        group.all_gather_rows([4, 5])


def test_addresses_are_read_with_and_without_brackets() -> None:
    assert (GroupSpec("[::1]:80", 0, 1, 0, 1).host, GroupSpec("a:81", 0, 1, 0, 1).port) == (
        "::1",
        81,
    )
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        address_towards("no-such-host.invalid", 9)
