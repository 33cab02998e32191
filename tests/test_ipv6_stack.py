"""A cluster that speaks IPv6 alone: coordinator, engines, front ends, probes."""

from collections.abc import Iterator

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import coordinator, run_swell
from tests.support.http import complete, fetch, ready_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.stack

QUICK = ("--heartbeat-interval", "0.3")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """A coordinator on ::1; the flags with which others find it."""
    with coordinator(tmp_path_factory.mktemp("ipv6"), *QUICK, host="[::1]") as flags:
        yield flags
        port = int(flags[1].rpartition(":")[2])
        assert fetch(f"http://[::1]:{port + 4}/ready").status == 200


def test_a_cluster_serves_over_ipv6(flags: tuple[str, ...]) -> None:
    engines = ("--executor", "simulated", "--data-parallel-size-local", "2")
    with RunningStack(*flags, *engines, "--api-server-count", "2", "--host", "::1") as stack:
        assert stack.url.startswith("http://[::1]")
        until(lambda: ready_ranks(stack.url) == {0, 1}, "both engines are seen")
        for _ in range(6):
            complete(stack.url, "Act", 2)
        said = run_swell("coordinator", flags[0], "::1:7550")
        assert said.returncode != 0
        assert "an IPv6 address needs brackets" in said.stdout + said.stderr


def test_lockstep_engines_connect_over_ipv6(flags: tuple[str, ...]) -> None:
    together = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    with RunningStack(
        *flags, *together, "--threads", "1", "--api-server-count", "1", "--host", "*"
    ) as stack:
        assert stack.url.startswith("http://[::")
        complete(f"http://[::1]:{stack.url.rpartition(':')[2]}", "Act", 8)
