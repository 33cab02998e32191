"""What a front end knows of the engines, and that no send is counted twice or forgotten."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.shared.messages import ClusterView, EngineEntry, EngineSetup, EngineStats, Received
from engine.shared.scope import Scope
from server.router.load_table import LoadTable, create_load_table
from server.router.routing import LeastLoaded
from server.router.state import ClusterState, EngineLost

ME, MY_INCARNATION = 0, 500


def setup(max_model_len: int = 512) -> EngineSetup:
    return EngineSetup(
        num_kv_blocks=10, block_size=16, max_model_len=max_model_len, model_fingerprint="f"
    )


def stats(
    rank: int, incarnation: int, version: int, *, running: int = 0, waiting: int = 0,
    tokens: int = 0, received: tuple[Received, ...] = (),
) -> EngineStats:  # fmt: skip
    return EngineStats(
        rank=rank, incarnation=incarnation, version=version, wave=0, step=0, waiting=waiting,
        running=running, kv_usage=0.0, queued_prefill_tokens=tokens, received=list(received),
    )  # fmt: skip


def entry(
    rank: int, incarnation: int, of: EngineStats | None = None, *, ready: bool = True
) -> EngineEntry:
    return EngineEntry(rank, incarnation, ready, "h", 0, setup() if ready else None, of)


def view(
    version: int, *engines: EngineEntry, epoch: int = 1, running: bool = False, wave: int = 0
) -> ClusterView:
    return ClusterView(
        epoch=epoch, version=version, wave=wave, running=running, engines=list(engines),
        num_front_ends=1,
    )  # fmt: skip


def with_engines(*incarnations: int, table: LoadTable | None = None) -> ClusterState:
    state = ClusterState(ME, MY_INCARNATION, grace=5.0, table=table)
    for rank, incarnation in enumerate(incarnations):
        state.heard_hello(rank, incarnation, b"%d" % incarnation, session=1, now=0.0)
    state.update_view(view(1, *(entry(r, i) for r, i in enumerate(incarnations))), now=0.0)
    return state


def requests(state: ClusterState) -> list[int]:
    return [load.requests for load in state.loads()]


def test_an_engine_takes_requests_once_ready_and_greeted_in_any_order() -> None:
    state = ClusterState(ME, MY_INCARNATION, grace=5.0, table=None)
    state.update_view(view(1, entry(0, 10, ready=False)), now=0.0)
    assert not state.ready
    state.heard_hello(0, 10, b"x", session=1, now=0.0)
    assert not state.ready
    state.update_view(view(2, entry(0, 10)), now=0.0)
    assert state.ready
    assert state.address_of(0) == (10, b"x")
    assert state.max_model_len == 512


def test_the_greeting_of_a_predecessor_opens_no_route() -> None:
    state = ClusterState(ME, MY_INCARNATION, grace=5.0, table=None)
    state.heard_hello(0, 9, b"old", session=1, now=0.0)
    state.update_view(view(1, entry(0, 10)), now=0.0)
    assert state.address_of(0) is None


def test_a_burst_is_counted_before_any_stats_show_it() -> None:
    state = with_engines(10, 11)
    policy = LeastLoaded()
    for _ in range(100):
        state.sent(policy.choose(state.loads()).rank, prompt_tokens=7)
    assert requests(state) == [50, 50]
    assert [load.prefill_tokens for load in state.loads()] == [350, 350]


def test_a_snapshot_does_not_overwrite_what_it_has_not_seen() -> None:
    state = with_engines(10)
    for _ in range(5):
        state.sent(0, prompt_tokens=10)
    seen = Received(ME, MY_INCARNATION, requests=3, prompt_tokens=30)
    state.observe(stats(0, 10, 1, running=3, received=(seen,)), now=1.0)
    (load,) = state.loads()
    assert load.requests == 3 + 2
    assert load.prefill_tokens == 20


def test_finished_requests_leave_no_count_behind() -> None:
    state = with_engines(10)
    for _ in range(5):
        state.sent(0, prompt_tokens=10)
    seen = Received(ME, MY_INCARNATION, requests=5, prompt_tokens=50)
    state.observe(stats(0, 10, 1, received=(seen,)), now=1.0)
    assert requests(state) == [0]


def test_what_a_restarted_front_end_of_my_number_had_sent_is_not_mine() -> None:
    state = with_engines(10)
    state.sent(0, prompt_tokens=10)
    predecessor = Received(ME, MY_INCARNATION - 1, requests=99, prompt_tokens=990)
    state.observe(stats(0, 10, 1, received=(predecessor,)), now=1.0)
    assert requests(state) == [1]


def test_older_stats_are_ignored_wherever_they_come_from() -> None:
    state = with_engines(10)
    state.observe(stats(0, 10, 5, running=2), now=1.0)
    state.update_view(view(2, entry(0, 10, stats(0, 10, 4, running=9))), now=2.0)
    assert requests(state) == [2]
    assert state.stats_age(3.0) == {0: 2.0}


def test_an_engine_that_left_is_lost_with_its_incarnation() -> None:
    state = with_engines(10, 11)
    assert state.update_view(view(2, entry(1, 11)), now=1.0) == [EngineLost(0, 10)]
    assert [load.rank for load in state.loads()] == [1]


def test_a_restarted_engine_is_a_loss_and_starts_from_nothing() -> None:
    state = with_engines(10)
    state.sent(0, prompt_tokens=10)
    state.heard_hello(0, 20, b"new", session=1, now=0.0)
    assert state.update_view(view(2, entry(0, 20)), now=1.0) == [EngineLost(0, 10)]
    assert requests(state) == [0]
    assert state.address_of(0) == (20, b"new")


def test_an_engine_that_was_only_silent_comes_back_with_its_route_and_counts() -> None:
    state = with_engines(10)
    for _ in range(5):
        state.sent(0, prompt_tokens=10)
    assert state.update_view(view(2), now=1.0) == [EngineLost(0, 10)]
    state.update_view(view(3, entry(0, 10)), now=2.0)
    assert state.address_of(0) == (10, b"10")
    state.sent(0, prompt_tokens=10)
    seen = Received(ME, MY_INCARNATION, requests=5, prompt_tokens=50)
    state.observe(stats(0, 10, 9, received=(seen,)), now=3.0)
    assert requests(state) == [1]


def test_another_connection_of_the_same_process_is_told_apart() -> None:
    state = with_engines(10)
    assert not state.heard_hello(0, 10, b"10", session=1, now=0.0)
    assert state.heard_hello(0, 10, b"10", session=2, now=0.0)
    assert not state.heard_hello(0, 20, b"20", session=1, now=0.0)


def test_an_engine_found_dead_stays_dead_until_it_is_replaced() -> None:
    state = with_engines(10)
    assert state.lost(0, 10) == [EngineLost(0, 10)]
    assert state.lost(0, 10) == []
    assert state.update_view(view(2, entry(0, 10)), now=1.0) == []
    assert not state.ready
    state.heard_hello(0, 20, b"new", session=1, now=0.0)
    state.update_view(view(3, entry(0, 20)), now=2.0)
    assert state.ready


def test_a_restarted_coordinator_that_knows_no_engine_yet_takes_none_away() -> None:
    state = with_engines(10, 11)
    assert state.update_view(view(1, epoch=2), now=1.0) == []
    assert len(state.loads()) == 2
    assert state.update_view(view(2, entry(0, 10), epoch=2), now=2.0) == []
    assert state.tick(6.5) == [EngineLost(1, 11, was_silent=True)]
    assert [load.rank for load in state.loads()] == [0]


def test_paused_is_believed_only_when_nothing_contradicts_it() -> None:
    state = with_engines(10)
    assert state.paused
    state.observe(stats(0, 10, 1, running=1), now=1.0)
    assert not state.paused
    state.observe(stats(0, 10, 2), now=1.0)
    assert state.paused
    state.update_view(view(2, entry(0, 10), running=True), now=2.0)
    assert not state.paused


def test_front_ends_of_one_node_see_each_others_unreceived_sends(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    create_load_table(path, num_front_ends=2)
    tables = [LoadTable(path, 0), LoadTable(path, 1)]
    mine = with_engines(10, table=tables[0])
    peer = ClusterState(1, 600, grace=5.0, table=tables[1])
    peer.heard_hello(0, 10, b"p", session=1, now=0.0)
    peer.update_view(view(1, entry(0, 10)), now=0.0)
    for _ in range(4):
        peer.sent(0, prompt_tokens=3)
    assert requests(mine) == [4]
    seen = Received(1, 600, requests=3, prompt_tokens=9)
    mine.observe(stats(0, 10, 1, running=3, received=(seen,)), now=1.0)
    assert requests(mine) == [3 + 1]
    mine.update_view(view(2, entry(0, 20)), now=2.0)
    mine.heard_hello(0, 20, b"n", session=1, now=0.0)
    assert requests(mine) == [0], "sends to the predecessor are not on their way to this one"
    for table in tables:
        table.close()


@given(st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=60), st.data())
def test_load_is_exact_whatever_the_engine_has_received(
    sends: list[int], data: st.DataObject
) -> None:
    state = with_engines(10, 11, 12, 13)
    sent = [0, 0, 0, 0]
    running = [0, 0, 0, 0]
    for version, rank in enumerate(sends, start=1):
        state.sent(rank, prompt_tokens=1)
        sent[rank] += 1
        running[rank] = data.draw(st.integers(min_value=running[rank], max_value=sent[rank]))
        seen = Received(ME, MY_INCARNATION, running[rank], running[rank])
        report = stats(rank, 10 + rank, version, running=running[rank], received=(seen,))
        state.observe(report, now=0.0)
        assert requests(state) == sent


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ties_go_round_within_the_tied_tier_only(count: int) -> None:
    state = with_engines(*range(10, 10 + count + 1))
    for _ in range(3):
        state.sent(0, prompt_tokens=1)
    policy = LeastLoaded()
    chosen = [policy.choose(state.loads()) for _ in range(2 * count)]
    assert sorted(choice.rank for choice in chosen) == sorted(2 * list(range(1, count + 1)))


def test_engines_beyond_reach_do_not_exist_for_a_front_end() -> None:
    state = ClusterState(ME, MY_INCARNATION, grace=5.0, table=None, scope=Scope(rank=1))
    for rank in (0, 1):
        state.heard_hello(rank, rank + 10, b"%d" % rank, session=1, now=0.0)
    state.update_view(view(1, entry(0, 10), entry(1, 11)), now=0.0)
    assert [load.rank for load in state.loads()] == [1]
    assert state.view is not None
    assert [each.rank for each in state.view.engines] == [1]
    assert state.update_view(view(2, entry(1, 11)), now=0.1) == []
    assert state.update_view(view(3, entry(0, 10)), now=0.2) == [EngineLost(1, 11)]
    assert not state.ready


def test_front_ends_of_other_nodes_are_those_that_the_table_does_not_hold(tmp_path: Path) -> None:
    create_load_table(tmp_path / "loads", 2)
    of_two = ClusterState(ME, MY_INCARNATION, 5.0, LoadTable(tmp_path / "loads", 0))
    alone = ClusterState(ME, MY_INCARNATION, 5.0, None)
    near = ClusterState(ME, MY_INCARNATION, 5.0, None, Scope(node="a"))
    for state in (of_two, alone, near):
        assert state.unseen_front_ends == 0
        state.update_view(ClusterView(1, 1, 0, False, [], num_front_ends=6), now=0.0)
    assert [of_two.unseen_front_ends, alone.unseen_front_ends, near.unseen_front_ends] == [4, 5, 0]


def test_an_engine_that_is_not_heard_is_out_of_reach_until_it_greets_again() -> None:
    state = with_engines(10, 11)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert state.unheard(now) == []
        state.heard_hello(1, 11, b"11", session=1, now=now)
    assert state.unheard(6.0) == [EngineLost(0, 10, was_silent=True)]
    assert [load.rank for load in state.loads()] == [1]
    assert state.unheard(6.5) == []
    state.heard_hello(0, 10, b"10", session=1, now=7.0)
    assert [load.rank for load in state.loads()] == [0, 1]


def test_a_front_end_that_was_held_up_itself_takes_nobody_for_silent() -> None:
    state = with_engines(10)
    state.unheard(1.0)
    assert state.unheard(30.0) == []
    assert state.unheard(31.0) == []


def test_a_message_that_never_came_is_missed_and_a_repeated_one_is_known() -> None:
    state = with_engines(10)

    def arrived(outputs: int) -> int:
        seen = Received(ME, MY_INCARNATION, requests=0, prompt_tokens=0, outputs=outputs)
        return state.outputs_arrived(stats(0, 10, outputs, received=(seen,)))

    assert [arrived(1), arrived(2), arrived(2), arrived(4), arrived(3), arrived(5)] == [
        0, 0, -1, 1, -2, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["request", "outputs"])
def test_what_stays_missing_for_a_grace_was_lost(what: str) -> None:
    state = with_engines(10)
    state.sent(0, 8)
    requests, outputs = (0, 0) if what == "request" else (1, 1)
    for version, now in enumerate((1.0, 3.0, 5.9)):
        seen = Received(ME, MY_INCARNATION, requests, 8 * requests, outputs)
        state.observe(stats(0, 10, version + 1, received=(seen,)), now)
        assert not state.take_broken()
    state.observe(stats(0, 10, 9, received=(seen,)), 6.1)
    assert state.take_broken() == {(0, 10)}
    state.forget_unreceived(0)
    assert [load.requests for load in state.loads()] == [0]


def test_what_was_taken_for_lost_and_arrives_is_not_counted_against_later_requests() -> None:
    state = with_engines(10)
    state.sent(0, 8)
    state.forget_unreceived(0)
    late = Received(ME, MY_INCARNATION, requests=1, prompt_tokens=8)
    state.observe(stats(0, 10, 1, received=(late,)), 1.0)
    state.sent(0, 8)
    assert [load.requests for load in state.loads()] == [1]
