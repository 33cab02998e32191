"""API servers on every node that has engines."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.failover import streamed_choices
from benchmarks.running_stack import RunningStack
from tests.ray.cluster import hosts, scale, serve, uses
from tests.ray.nodes import Nodes, is_empty
from tests.support.commands import run_swell
from tests.support.http import ADMIN_KEY, complete, completion, ready_ranks
from tests.support.load import Load
from tests.support.waiting import PATIENCE, until

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


def test_each_node_serves_all_engines_and_recovers(stack: RunningStack) -> None:
    expected = {"api 0": "ready"} | {f"api on {node}": "ready" for node in WHERE}
    assert phases(stack) == expected
    for node in WHERE:
        there = url(stack, node)
        until(lambda: ready_ranks(there) == {0, 1, 2}, "all engines are seen")  # noqa: B023
        until(lambda: uses(there) == {"0", "1", "2"}, "all engines are used")  # noqa: B023
    told = run_swell("status", "--url", stack.url, "--admin-key", ADMIN_KEY).stdout
    assert "api on 127.0.0.3" in told
    before = {each.pid for each in api_servers()}
    assert len(before) == 2
    api_servers()[0].kill()
    until(lambda: len({each.pid for each in api_servers()} - before) == 1, "another one")
    until(lambda: phases(stack) == expected, "it serves again")
    for node in WHERE:
        complete(url(stack, node), "Act", 2)


def test_hybrid_servers_balance_over_their_node_and_external_ones_have_one_engine(
    nodes: Nodes, tmp_path: Path
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text("a secret of these nodes")
    flags = ("--cluster-key-file", str(key), "--data-parallel-size", "4", "--executor", "simulated")
    hybrid = ("--data-parallel-lb", "hybrid", "--api-server-placement", "every-node")
    with serve(nodes, *flags, *hybrid, "--data-parallel-size-local", "2") as stack:
        ranks: dict[str, set[str]] = {}
        for rank, node in hosts(stack).items():
            ranks.setdefault(node, set()).add(rank)
        assert ranks == {nodes.head_address: {"0", "1"}, WHERE[0]: {"2", "3"}}
        for node, expected in ranks.items():
            there = stack.url if node == nodes.head_address else url(stack, node)
            answers_with(there, expected)
        told = re.search(r"listening on tcp://(\S+)", "\n".join(stack.lines))
        assert told is not None
        join = ("--coordinator", told[1], "--cluster-key-file", str(key))
        external = ("--data-parallel-lb", "external", "--data-parallel-rank", "3")
        with RunningStack(*join, *external, command="api-server") as front:
            answers_with(front.url, {"3"})
    until(lambda: is_empty(nodes) and not api_servers(), "nothing is left")


def answers_with(there: str, ranks: set[str]) -> None:
    """Check that these engines, and no others, are seen and used."""
    until(lambda: ready_ranks(there) == {int(rank) for rank in ranks}, "they are seen")
    until(lambda: uses(there) == ranks, "they are used")


def test_server_on_lost_node_is_abandoned_and_one_without_engines_drains() -> None:
    """Clients of the others notice nothing; those of one that drains get what they asked for."""
    flags = ("--ray-dp-pack-strategy", "fill", "--api-server-placement", "every-node")
    slow = ("--executor", "simulated", "--simulated-step-us", "3000")
    with Nodes(1, 1, 1) as three, serve(three, *slow, *flags) as stack:
        assert phases(stack) == {"api 0": "ready", f"api on {WHERE[0]}": "ready"}
        with Load(stack.url, 4).running() as load:
            three.lose(WHERE[0])
            until(lambda: phases(stack).get(f"api on {WHERE[1]}") == "ready", "one follows")
            load.goes_on()
        load.check()
        there = url(stack, WHERE[1])
        until(lambda: ready_ranks(there) == {0, 1}, "it balances over all engines")
        scale(stack, 1)
        assert asyncio.run(stream_until_refused(there)) == ""
        until(lambda: phases(stack) == {"api 0": "ready"}, "both places have been left")
        complete(stack.url, "Act", 2)
    until(lambda: not api_servers(), "nothing is left")


async def stream_until_refused(there: str) -> str:
    """Stream again and again until nobody listens; return what was wrong with a stream."""
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(base_url=there, timeout=60) as client:
        while True:
            began = False
            try:
                async for _ in streamed_choices(client, "/v1/completions", completion("Act", 60)):
                    began = True
            except (httpx.HTTPError, ValueError, ConnectionError) as error:
                return repr(error) if began else ""
