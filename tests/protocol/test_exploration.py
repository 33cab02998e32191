"""The production state machines satisfy the wave protocol's properties in every state.

Safety: no rank enters a collective that a peer will not join; waves never go back; requests and
calls cause exactly the expected number of waves.
Liveness: from every state all accepted requests finish, and the group ends paused.
"""

import pytest

from tests.protocol.catalog import SMALL, check
from tests.protocol.explorer import Label, State, Violation, explore
from tests.protocol.situation import Setup
from tests.protocol.world import World

QUICK = {"3 engines, 1 request", "a gather in every 2nd step", "held and resumed without requests"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SMALL]
)
def test_every_interleaving_reaches_a_good_end(name: str) -> None:
    result = check(SMALL[name])
    print(f"{name}: {result}")
    assert result.problem is None, result.problem


def test_equivalent_states_are_visited_once() -> None:
    one, two = (explore(World(Setup(front_ends=number))).states for number in (1, 2))
    assert one == two, "with one request it does not matter which of two front ends sends it"


class Maze:
    """States are numbers; 9 is the end, and reaching 7 is forbidden."""

    def __init__(self, **ways: tuple[int, ...]) -> None:
        self.ways = {int(name[1:]): targets for name, targets in ways.items()}

    def initial(self) -> State:
        return (0,)

    def successors(self, state: State) -> list[tuple[Label, State]]:
        if 7 in self.ways.get(state[0], ()):
            raise Violation("reached 7")
        return [(("go", target), (target,)) for target in self.ways.get(state[0], ())]

    def is_final(self, state: State) -> bool:
        return state == (9,)


def found(maze: Maze, *, settles: bool = True) -> tuple[str, list[Label]] | None:
    problem = explore(maze, settles=settles).problem
    return problem and (problem.kind, problem.trace)


def test_the_explorer_accepts_a_loop_that_can_be_left() -> None:
    assert found(Maze(_0=(1,), _1=(0, 9))) is None


def test_explorer_finds_shortest_path_to_violation() -> None:
    maze = Maze(_0=(1, 2), _1=(3,), _2=(7, 9), _3=(7,))
    assert found(maze) == ("violation", [("go", 2)])


def test_the_explorer_finds_a_dead_end() -> None:
    assert found(Maze(_0=(1, 9), _1=(2,))) == ("no way to the end", [("go", 1)])


def test_explorer_finds_inescapable_loop() -> None:
    assert found(Maze(_0=(1, 9), _1=(2,), _2=(1,))) == ("no way to the end", [("go", 1)])


def test_the_explorer_finds_an_end_that_does_not_last() -> None:
    assert found(Maze(_0=(9,), _9=(1,), _1=(9,))) == ("no way to the end", [])


def test_explorer_distinguishes_final_from_transient_states() -> None:
    maze = Maze(_0=(9, 8), _8=(9,))
    assert found(maze) is None
