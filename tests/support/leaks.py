"""Whether the tests of this process have left processes behind."""

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from tests.support.waiting import PATIENCE, until

_LIVES_ON = "multiprocessing.resource_tracker"
"""Python's own, which ends with the process that started it."""


def living_children() -> list[str]:
    """Return the commands of the processes that this one has started, at any depth, and that run.

    One that has ended is no leak, though nobody has asked for its exit code yet.
    """
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(each.cmdline())
            if each.status() != psutil.STATUS_ZOMBIE and _LIVES_ON not in command:
                found.append(f"{each.pid} {command}".strip())
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests() -> Iterator[None]:
    """Fail the last test if what any of them started still runs when all fixtures have ended."""
    before = set(living_children())
    yield
    left: list[str] = []

    def all_have_ended() -> bool:
        left[:] = set(living_children()) - before
        return not left

    with contextlib.suppress(AssertionError):
        until(all_have_ended, "all that tests started has ended", within=PATIENCE)
    assert not left, f"tests have left processes behind: {left}"
