"""Engines added, taken away and replaced under load: nobody notices."""

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import run_swell
from tests.support.http import (
    ADMIN_KEY,
    are_replaced,
    call,
    fetch,
    incarnations,
    ready_ranks,
)
from tests.support.load import Load, settle
from tests.support.waiting import until

pytestmark = pytest.mark.stack

FLAGS = ("--executor", "simulated", "--simulated-step-us", "10000", "--admin-key", ADMIN_KEY)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a stack whose size the tests change."""
    with RunningStack(*FLAGS) as stack:
        yield stack.url


def test_scaling_and_replacing_engines_under_load_fails_no_request(url: str) -> None:
    with Load(url, 8).running() as load:
        for size in (3, 1, 2):
            answer = call(f"{url}/admin/scale", {"data_parallel_size": size})
            assert (answer["data_parallel_size"], answer["busy"]) == (size, True)
            status = settle(url, size)
            assert status["error"] is None
            load.goes_on()
            if size == 3:
                continue
            # The only engine, and of several one after the other.
            replaced = partial(are_replaced, url, incarnations(url, range(size)), range(size))
            call(f"{url}/admin/restart", {})
            settle(url, size)
            until(replaced, "all are other processes")
            load.goes_on()
    load.check()


@pytest.mark.parametrize("size", [0, -1, 5000, "two"])
def test_an_impossible_size_is_refused_by_name(url: str, size: object) -> None:
    answer = fetch(f"{url}/admin/scale", {"data_parallel_size": size})
    assert (answer.status, answer.error["param"]) == (400, "data_parallel_size")


def test_scale_command_scales_and_reports(url: str) -> None:
    flags = ("--url", url, "--admin-key", ADMIN_KEY)
    done = run_swell("scale", "2", *flags)
    assert (done.returncode, done.stdout) == (0, "2 engines: engine 0 ready, engine 1 ready\n")
    assert run_swell("scale", *flags).stdout == done.stdout
    wrong_key = run_swell("scale", "2", "--url", url, "--admin-key", "wrong")
    assert wrong_key.returncode == 1
    assert "key" in wrong_key.stderr
    nobody = run_swell("scale", "2", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "cannot be reached" in nobody.stderr


def test_the_status_command_shows_every_engine(url: str) -> None:
    def shows_all() -> bool:
        """Whether the front end that the command asked knows what the one asked here knows."""
        ranks = ready_ranks(url)
        done = run_swell("status", "--url", url, "--admin-key", ADMIN_KEY)
        assert done.returncode == 0
        rows = [line.split() for line in done.stdout.splitlines()]
        return (
            f"{len(ranks)} of {len(ranks)} engines ready, 2 API servers" in done.stdout
            and {int(row[0]) for row in rows if row[2:3] == ["ready"]} == ranks
        )

    until(shows_all, "the command shows every engine")
