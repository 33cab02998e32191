"""How long a coordinator waits before it assigns numbers."""

import pytest

from coordinator.members import MAX_WAIT, NumberAssignment
from engine.shared.messages import Hello


@pytest.mark.parametrize(("grace", "wait"), [(0.0, 0.0), (3600.0, MAX_WAIT)])
def test_number_is_assigned_at_once_without_grace_and_within_join_timeout(
    grace: float, wait: float
) -> None:
    numbers = NumberAssignment(grace)
    numbers.start(100.0)
    assert numbers.number_for(Hello("front_end", -1, 9, "h", 1), {}, 100.0 + wait) == 0
