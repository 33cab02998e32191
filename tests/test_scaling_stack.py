"""Engines added, taken away and replaced under load: nobody notices."""

from collections.abc import Iterator

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


def test_scaling_up_and_down_under_load_fails_no_request() -> None:
    with RunningStack(*FLAGS) as stack, Load(stack.url, 16).running() as load:
        for size in (4, 1, 3):
            answer = call(f"{stack.url}/admin/scale", {"data_parallel_size": size})
            assert (answer["data_parallel_size"], answer["busy"]) == (size, True)
            status = settle(stack.url, size)
            assert status["error"] is None
            load.goes_on()
    load.check()


@pytest.mark.parametrize("size", [1, 2])
def test_replacing_every_engine_under_load_fails_no_request(size: int) -> None:
    flags = (*FLAGS, "--data-parallel-size", str(size))
    with RunningStack(*flags) as stack, Load(stack.url, 8).running() as load:
        old = incarnations(stack.url, range(size))
        call(f"{stack.url}/admin/restart", {})
        settle(stack.url, size)
        until(lambda: are_replaced(stack.url, old, range(size)), "all are other processes")
        load.goes_on()
    load.check()


@pytest.mark.parametrize("size", [0, -1, 5000, "two"])
def test_an_impossible_size_is_refused_by_name(stack_with_admin: str, size: object) -> None:
    answer = fetch(f"{stack_with_admin}/admin/scale", {"data_parallel_size": size})
    assert (answer.status, answer.error["param"]) == (400, "data_parallel_size")


def test_the_command_scales_and_says_so(stack_with_admin: str) -> None:
    flags = ("--url", stack_with_admin, "--admin-key", ADMIN_KEY)
    done = run_swell("scale", "3", *flags)
    assert (done.returncode, done.stdout) == (
        0, "3 engines: engine 0 ready, engine 1 ready, engine 2 ready\n"
    )  # fmt: skip
    assert run_swell("scale", *flags).stdout == done.stdout
    wrong_key = run_swell("scale", "2", "--url", stack_with_admin, "--admin-key", "wrong")
    assert wrong_key.returncode == 1
    assert "key" in wrong_key.stderr
    nobody = run_swell("scale", "2", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "cannot be reached" in nobody.stderr


@pytest.fixture(scope="module")
def stack_with_admin() -> Iterator[str]:
    with RunningStack(*FLAGS) as stack:
        yield stack.url


def test_the_status_command_shows_every_engine(stack_with_admin: str) -> None:
    def shows_all() -> bool:
        """Whether the front end that the command asked knows what the one asked here knows."""
        ranks = ready_ranks(stack_with_admin)
        done = run_swell("status", "--url", stack_with_admin, "--admin-key", ADMIN_KEY)
        assert done.returncode == 0
        rows = [line.split() for line in done.stdout.splitlines()]
        return (
            f"{len(ranks)} of {len(ranks)} engines ready, 2 API servers" in done.stdout
            and {int(row[0]) for row in rows if row[2:3] == ["ready"]} == ranks
        )

    until(shows_all, "the command shows every engine")
