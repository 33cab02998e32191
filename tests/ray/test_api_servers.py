"""API servers on every node that has engines."""

from collections.abc import Iterator

import psutil
import pytest

from benchmarks.running_stack import RunningStack
from tests.ray.cluster import Nodes, is_empty, scale, serve
from tests.support.commands import run_swell
from tests.support.http import ADMIN_KEY, complete, ready_ranks
from tests.support.metrics import metric
from tests.support.waiting import until

pytestmark = pytest.mark.ray

WHERE = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def stack(nodes: Nodes) -> Iterator[RunningStack]:
    flags = ("--data-parallel-size", "3", "--data-parallel-size-local", "1")
    placed = ("--api-server-placement", "every-node")
    with serve(nodes, "--executor", "simulated", *flags, *placed) as running:
        yield running
    until(lambda: is_empty(nodes) and not api_servers(), "nothing is left")


def api_servers() -> list[psutil.Process]:
    """Return the API servers below actors of Ray."""
    found = []
    for each in psutil.process_iter():
        try:
            parent = each.parent()
            by_ray = parent is not None and " ".join(parent.cmdline()).startswith("ray::")
            if by_ray and " ".join(each.cmdline()).startswith("swell: api"):
                found.append(each)
        except psutil.Error:
            continue
    return found


def url(stack: RunningStack, node: str) -> str:
    return f"http://{node}:{stack.url.rpartition(':')[2]}"


def phases(stack: RunningStack) -> dict[str, str]:
    found: dict[str, str] = scale(stack)["api_servers"]
    return found


def test_each_node_answers_for_all_engines_and_comes_back(stack: RunningStack) -> None:
    expected = {"api 0": "ready"} | {f"api on {node}": "ready" for node in WHERE}
    assert phases(stack) == expected
    for node in WHERE:
        there = url(stack, node)
        until(lambda: ready_ranks(there) == {0, 1, 2}, "all engines are seen")  # noqa: B023
        for _ in range(9):
            complete(there, "Act", 2)
        assert len(metric(there, "routing_decisions_total")) == 3
    told = run_swell("status", "--url", stack.url, "--admin-key", ADMIN_KEY).stdout
    assert "api on 127.0.0.3" in told
    before = {each.pid for each in api_servers()}
    assert len(before) == 2
    api_servers()[0].kill()
    until(lambda: len({each.pid for each in api_servers()} - before) == 1, "another one")
    until(lambda: phases(stack) == expected, "it serves again")
    for node in WHERE:
        complete(url(stack, node), "Act", 2)
