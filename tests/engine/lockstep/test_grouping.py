"""Engines that execute orders to form a group, each in its own process."""

from collections.abc import Iterator

import pytest

from tests.engine.processes import Process, World


@pytest.fixture
def engines() -> Iterator[list[Process]]:
    world = World("tests.engine.lockstep.group_member")
    members = world.take(2)
    for rank, member in enumerate(members):
        member.ask("begin", rank)
    yield members
    world.end()


def form(engines: list[Process], topology: int, ranks: list[int]) -> None:
    """Order these engines to form a group: prepare, then connect to the first one's address."""
    prepared = [engines[rank].ask("ordered", topology, ranks, "") for rank in ranks]
    assert [state for state, _, _ in prepared] == ["prepared"] * len(ranks)
    for rank in ranks:
        engines[rank].tell("ordered", topology, ranks, prepared[0][1])
    for position, rank in enumerate(ranks):
        state, _, assignment = engines[rank].result()
        assert (state, assignment) == ("joined", [position, len(ranks), topology])


def test_engines_join_as_ordered_and_a_newer_order_releases_waiting_ones(
    engines: list[Process],
) -> None:
    form(engines, 1, [0, 1])
    for rank, engine in enumerate(engines):
        engine.tell("rows", [rank, 7])
    assert [engine.result() for engine in engines] == [[[0, 7], [1, 7]]] * 2

    engines[0].ask("hears_of", 2, 0.2)
    engines[0].tell("rows", [5])
    assert "broken" in engines[0].answer()
    engines[1].tell("rows", [5])
    assert "broken" in engines[1].answer()
    for engine in engines:
        assert engine.ask("leave_broken") == "apart"

    form(engines, 3, [1])
    assert engines[1].ask("rows", [4]) == [[4]]
    form(engines, 4, [1, 0])
