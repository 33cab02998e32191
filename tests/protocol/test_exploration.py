"""The production state machines satisfy the wave protocol's properties in every state.

Safety: no rank enters a collective that a peer will not join; waves never go back; requests and
calls cause exactly the expected number of waves.
Liveness: from every state all accepted requests finish, and the group ends paused.
"""

import pytest

from tests.protocol.catalog import SMALL, check
from tests.protocol.explorer import explore
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
