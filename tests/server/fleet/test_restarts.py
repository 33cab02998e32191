"""When a process slot is refilled: after deaths, and after failed starts."""

from server.fleet.keeper import (
    FIRST_BACKOFF,
    MAX_BACKOFF,
    MAX_SPAWN_BACKOFF,
    STABLE_AFTER,
    Restarts,
)


def test_first_process_of_a_role_is_not_restarted() -> None:
    assert Restarts().wait_after(1.0, was_ready=False) is None
    assert Restarts().wait_after_failed_spawn() is None


def test_restarts_back_off_and_reset() -> None:
    restarts = Restarts()
    waits = [restarts.wait_after(1.0, was_ready=True) for _ in range(10)]
    assert waits[:3] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
    assert waits[-1] == MAX_BACKOFF
    assert restarts.wait_after(STABLE_AFTER + 1, was_ready=True) == FIRST_BACKOFF


def test_failed_spawns_of_proven_role_are_retried_indefinitely() -> None:
    restarts = Restarts()
    restarts.wait_after(1.0, was_ready=True)
    waits = [restarts.wait_after_failed_spawn() for _ in range(50)]
    assert waits[0] == FIRST_BACKOFF
    assert waits[-1] == MAX_SPAWN_BACKOFF
    restarts.wait_after(1.0, was_ready=True)
    assert restarts.wait_after_failed_spawn() == FIRST_BACKOFF, "one came about in between"


def test_replacement_is_retried_unless_failure_is_permanent() -> None:
    assert Restarts(proven=True).wait_after_failed_spawn() == FIRST_BACKOFF
    assert Restarts(proven=True).wait_after(0.1, was_ready=False) == FIRST_BACKOFF
    assert Restarts(proven=True).wait_after(0.1, was_ready=False, is_permanent=True) is None
    seasoned = Restarts(proven=True)
    seasoned.wait_after(5.0, was_ready=True)
    assert seasoned.wait_after(0.1, was_ready=False, is_permanent=True) is not None
