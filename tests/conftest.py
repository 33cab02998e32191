"""One whole stack for all tests that talk to a real server, and help when something hangs."""

import faulthandler
from collections.abc import Iterator

import pytest

from benchmarks.running_stack import RunningStack

faulthandler.enable()


@pytest.fixture(scope="session")
def stack() -> Iterator[RunningStack]:
    """`swell serve` as `make serve` starts it: bundled model, two engines, two API servers."""
    with RunningStack("--log-level", "warning") as running:
        yield running
