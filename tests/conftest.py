"""One whole stack for all tests that talk to a real server, and help when something hangs."""

import faulthandler
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import pytest
import zmq

from benchmarks.running_stack import RunningStack
from tests.support import processors, quick, strict
from tests.support.forking import ForkExec, forking
from tests.support.groups import pytest_xdist_make_scheduler
from tests.support.heap import pytest_collection
from tests.support.interpreter import interpret_without_device
from tests.support.leaks import no_process_outlives_the_tests
from tests.support.process_logs import pytest_runtest_makereport, pytest_runtest_setup
from tests.support.quick import pytest_ignore_collect
from tests.support.strict import pytest_collection_modifyitems

__all__ = [
    "no_process_outlives_the_tests",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_xdist_make_scheduler",
]

faulthandler.enable()
interpret_without_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the tests' own."""
    processors.add_option(parser)
    quick.add_option(parser)
    strict.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Do what they ask for."""
    processors.configure(config)
    quick.configure(config)
    strict.configure(config)


# How long an example takes is the machine's matter; what hangs is ended by pytest-timeout. All runs
# have the same examples, unless `--hypothesis-profile search` asks for others.
for _name, _is_fixed in (("fixed", True), ("search", False)):
    hypothesis.settings.register_profile(
        _name,
        derandomize=_is_fixed,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def forks(no_process_outlives_the_tests: None) -> Iterator[ForkExec]:
    """Forks what tests start from a process that has loaded the libraries."""
    with forking() as fork_exec:
        yield fork_exec


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Takes back what `swell` sets for its children where a test calls it in this process."""
    before = "PYTHONSAFEPATH" in os.environ
    yield
    if not before:
        os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture
def started_anew(forks: ForkExec) -> Iterator[None]:
    """Has the processes of a test load their libraries themselves, as in production."""
    with forks.paused():
        yield


@pytest.fixture(scope="session")
def stack(forks: ForkExec) -> Iterator[RunningStack]:
    """What `make serve` starts: bundled model, two engines, two API servers."""
    with RunningStack("--log-level", "warning", "--min-ready-engines", "2") as running:
        yield running


class KeepingContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context that holds on to its sockets until it is destroyed, as an owner would."""

    kept: ClassVar[list["zmq.Socket[bytes]"]] = []

    def socket(self, *arguments: Any, **options: Any) -> "zmq.Socket[bytes]":
        made = super().socket(*arguments, **options)
        self.kept.append(made)
        return made


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """A ZeroMQ context whose sockets are all closed when the test ends."""
    made = KeepingContext()
    yield made
    made.destroy(linger=0)
    KeepingContext.kept.clear()
