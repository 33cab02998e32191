"""Several nodes joined to one coordinator over encrypted TCP, each with processes of its own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import coordinator, run_swell, swell
from tests.support.http import complete, ready_ranks
from tests.support.metrics import metric, num_running
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

QUICK = ("--heartbeat-interval", "0.3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """A coordinator on TCP; the flags with which others find it."""
    with coordinator(tmp_path_factory.mktemp("nodes"), *QUICK) as flags:
        yield flags


@contextmanager
def nodes(cluster: tuple[str, ...], *per_node: tuple[str, ...]) -> Iterator[list[str]]:
    """Run a node for each set of flags; the URLs of their front ends."""
    with ExitStack() as running:
        urls = []
        for number, flags in enumerate(per_node):
            name = ("--node", f"node-{number}", "--executor", "simulated")
            stack = RunningStack(*cluster, *name, "--api-server-count", "1", *flags)
            urls.append(running.enter_context(stack).url)
        yield urls


def sees(url: str, ranks: set[int]) -> bool:
    return ready_ranks(url) == ranks


def ask(url: str, count: int) -> None:
    for _ in range(count):
        complete(url, "Act", 2)


def served_by(url: str) -> set[str]:
    """Return the engines to which this node's front ends have sent anything."""
    return set(metric(url, "routing_decisions_total"))


def shown_of(url: str) -> set[str]:
    """Return the engines whose load this node's front ends show."""
    return set(metric(url, "kv_cache_usage_perc"))


def uses_all(url: str, ranks: set[str]) -> bool:
    """Whether these engines, and no others, have been used once the node was asked again."""
    ask(url, 6)
    return served_by(url) == ranks


def test_front_ends_balance_over_the_engines_of_all_nodes(cluster: tuple[str, ...]) -> None:
    one_engine = ("--data-parallel-size-local", "1")
    with nodes(cluster, one_engine, one_engine) as urls:
        for url in urls:
            until(partial(sees, url, {0, 1}), "both engines are seen by both nodes")
            until(partial(uses_all, url, {"0", "1"}), "both engines are used")


def test_hybrid_front_ends_balance_over_the_engines_of_their_node(
    cluster: tuple[str, ...],
) -> None:
    hybrid = ("--data-parallel-lb", "hybrid", "--data-parallel-size-local")
    with nodes(
        cluster,
        (*hybrid, "1", "--data-parallel-start-rank", "0"),
        (*hybrid, "2", "--data-parallel-start-rank", "1"),
    ) as urls:
        until(partial(sees, urls[1], {1, 2}), "the second node sees its engines")
        until(partial(sees, urls[0], {0}), "the first node sees its engine")
        ask(urls[0], 6)
        until(partial(uses_all, urls[1], {"1", "2"}), "the second node uses both of its engines")
        assert served_by(urls[0]) == {"0"}


def test_external_front_ends_serve_one_engine_each(cluster: tuple[str, ...]) -> None:
    external = ("--data-parallel-lb", "external", "--data-parallel-rank")
    with nodes(cluster, (*external, "0"), (*external, "1")) as urls:
        for rank, url in enumerate(urls):
            ask(url, 3)
            until(partial(sees, url, {rank}), "a node sees its engine")
            assert served_by(url) == {str(rank)}
            # An endpoint picker takes these for the pod's.
            until(
                lambda: shown_of(url) == {str(rank)},  # noqa: B023
                "its engine's load is shown, and no other",
            )


def test_node_with_nothing_to_run_reports_it() -> None:
    run = run_swell("serve", "--api-server-count", "0")
    assert run.returncode == 1
    assert "needs its own engines and API servers" in run.stderr


def test_engines_of_stopped_node_finish_requests_of_remote_front_ends(
    cluster: tuple[str, ...],
) -> None:
    engines_only = (
        "--api-server-count", "0", "--data-parallel-size-local", "1", "--drain-timeout", "300",
        "--executor", "simulated", "--simulated-step-us", "20000",
    )  # fmt: skip
    with (
        swell("serve", *cluster, *engines_only) as node,
        RunningStack(*cluster, "--api-server-count", "2", command="api-server") as front,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(complete, front.url, "Act", 150)
        until(lambda: num_running(front.url) or answer.done(), "the request runs")
        node.terminate()
        assert answer.result(timeout=PATIENCE), "3 s of steps are within --drain-timeout"
        assert node.wait(PATIENCE) == 0


def test_an_empty_cluster_key_ends_a_node_with_the_reason(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("\n")
    address = f"127.0.0.1:{port_of_a_coordinator()}"
    flags = ("--coordinator", address, "--executor", "simulated", "--cluster-key-file", str(key))
    run = run_swell("serve", *flags, "--port", "0")
    assert run.returncode == 1
    assert "0 bytes and needs at least 16" in run.stderr
    assert "Traceback" not in run.stderr
