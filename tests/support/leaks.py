"""Detects processes that tests leave behind."""

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from tests.support.waiting import PATIENCE, until

_LIVE_ON = (
    "multiprocessing.resource_tracker",
    "server.text.request_templates",
    "server.generate.grammar_process",
)
"""They exit with the process that started them, or with an object that may be in a cycle."""


def living_children() -> list[str]:
    """Return the commands of all running descendants of this process.

    Zombies, whose exit code nobody has read yet, are not leaks.
    """
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(each.cmdline())
            ends_itself = any(name in command for name in _LIVE_ON)
            if each.status() != psutil.STATUS_ZOMBIE and not ends_itself:
                found.append(f"{each.pid} {command}".strip())
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests() -> Iterator[None]:
    """Fail the last test if any process started by tests outlives all fixtures."""
    before = set(living_children())
    yield
    left: list[str] = []

    def all_have_ended() -> bool:
        left[:] = set(living_children()) - before
        return not left

    with contextlib.suppress(AssertionError):
        until(all_have_ended, "all that tests started has ended", within=PATIENCE)
    assert not left, f"tests have left processes behind: {left}"
