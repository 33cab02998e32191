"""Several nodes joined to one coordinator over encrypted TCP, each with processes of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack

pytestmark = pytest.mark.stack

MODEL = "swell-shakespeare"
SWELL = str(Path(sys.executable).with_name("swell"))


def four_free_ports() -> int:
    """Return the first of four free ports in a row."""
    for first in range(20000 + os.getpid() % 10000, 60000, 4):
        try:
            with ExitStack() as held:
                for port in range(first, first + 4):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """A coordinator on TCP; the flags with which others find it."""
    key = tmp_path_factory.mktemp("nodes") / "cluster.key"
    key.write_text("a secret of these tests")
    flags = ("--coordinator", f"127.0.0.1:{four_free_ports()}", "--cluster-key-file", str(key))
    coordinator = subprocess.Popen([SWELL, "coordinator", *flags], stderr=subprocess.DEVNULL)
    try:
        yield flags
    finally:
        coordinator.terminate()
        assert coordinator.wait(10) == 0


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


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        time.sleep(0.02)


def engines_of(url: str) -> set[int]:
    with urllib.request.urlopen(f"{url}/status.json", timeout=10) as answer:
        return {each["rank"] for each in json.load(answer)["engines"] if each["ready"]}


def sees(url: str, ranks: set[int]) -> bool:
    return engines_of(url) == ranks


def complete(url: str, count: int) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Act", "max_tokens": 2}).encode()
    for _ in range(count):
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2


def served_by(url: str) -> set[str]:
    """Return the engines to which this node's front ends have sent anything."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    decisions = [each for each in lines if each.startswith("swell_routing_decisions_total{")]
    return {each.split('engine="')[1].split('"')[0] for each in decisions}


def test_front_ends_balance_over_the_engines_of_all_nodes(cluster: tuple[str, ...]) -> None:
    one_engine = ("--data-parallel-size-local", "1")
    with nodes(cluster, one_engine, one_engine) as urls:
        for url in urls:
            wait_until(partial(sees, url, {0, 1}), "both engines are seen by both nodes")
            complete(url, 6)
            assert len(served_by(url)) == 2


def test_hybrid_front_ends_balance_over_the_engines_of_their_node(
    cluster: tuple[str, ...],
) -> None:
    hybrid = ("--data-parallel-lb", "hybrid", "--data-parallel-size-local")
    with nodes(
        cluster,
        (*hybrid, "1", "--data-parallel-start-rank", "0"),
        (*hybrid, "2", "--data-parallel-start-rank", "1"),
    ) as urls:
        wait_until(partial(sees, urls[1], {1, 2}), "the second node sees its engines")
        assert engines_of(urls[0]) == {0}
        for url in urls:
            complete(url, 6)
        assert served_by(urls[0]) == {"0"}
        assert served_by(urls[1]) == {"1", "2"}


def test_external_front_ends_serve_one_engine_each(cluster: tuple[str, ...]) -> None:
    external = ("--data-parallel-lb", "external", "--data-parallel-rank")
    with nodes(cluster, (*external, "0"), (*external, "1")) as urls:
        for rank, url in enumerate(urls):
            complete(url, 3)
            assert engines_of(url) == {rank}
            assert served_by(url) == {str(rank)}


def test_a_node_may_hold_engines_only_and_another_front_ends_only(
    cluster: tuple[str, ...],
) -> None:
    engines = subprocess.Popen(
        [SWELL, "serve", *cluster, "--executor", "simulated", "--api-server-count", "0"],
        stderr=subprocess.DEVNULL,
    )
    try:
        with RunningStack(*cluster, "--api-server-count", "2", command="api-server") as front:
            wait_until(partial(sees, front.url, {0, 1}), "the engines are seen")
            complete(front.url, 6)
            assert len([name for name in front.processes() if name.startswith("api")]) == 2
    finally:
        engines.terminate()
        assert engines.wait(10) == 0


def test_a_node_with_nothing_to_run_says_so() -> None:
    run = subprocess.run(
        [SWELL, "serve", "--api-server-count", "0"], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 1
    assert "needs engines and API servers of its own" in run.stderr


@contextmanager
def engine_node(cluster: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node of one slow engine and no front ends; end it."""
    flags = ("--api-server-count", "0", "--data-parallel-size-local", "1", "--node", "engines")
    simulated = ("--executor", "simulated", "--simulated-step-us", "20000")
    with subprocess.Popen(
        [SWELL, "serve", *cluster, *flags, *simulated], stderr=subprocess.DEVNULL
    ) as node:
        try:
            yield node
        finally:
            node.kill()


def running(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("swell_num_requests_running{")]
    return any(float(line.split()[-1]) for line in counts)


def ask_for(url: str, tokens: int) -> int:
    body = {"model": MODEL, "prompt": "Act", "max_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def test_engines_of_a_node_that_is_stopped_end_what_front_ends_elsewhere_sent_them(
    cluster: tuple[str, ...],
) -> None:
    with (
        engine_node(cluster) as node,
        RunningStack(*cluster, "--api-server-count", "2", command="api-server") as front,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(ask_for, front.url, 150)
        wait_until(partial(running, front.url), "the request runs")
        node.terminate()
        assert answer.result(timeout=20) == 150, "3 s of steps are within --drain-timeout"
        assert node.wait(10) == 0


def test_a_second_signal_ends_engines_that_drain_at_once(cluster: tuple[str, ...]) -> None:
    with (
        engine_node(cluster) as node,
        RunningStack(*cluster, "--api-server-count", "2", command="api-server") as front,
        ThreadPoolExecutor(1) as client,
    ):
        client.submit(ask_for, front.url, 1000)
        wait_until(partial(running, front.url), "the request runs")
        node.terminate()
        wait_until(lambda: not engines_of(front.url), "the engine drains")
        assert node.poll() is None
        node.terminate()
        assert node.wait(3) == 0
        front.kill()


@pytest.mark.parametrize("variable", [False, True], ids=["flag", "variable"])
def test_an_empty_cluster_key_ends_a_node_with_the_reason(tmp_path: Path, variable: bool) -> None:
    key = tmp_path / "key"
    key.write_text("\n")
    flags = ("serve", "--coordinator", f"127.0.0.1:{four_free_ports()}", "--executor", "simulated")
    given = () if variable else ("--cluster-key-file", str(key))
    environment = {**os.environ, "SWELL_CLUSTER_KEY_FILE": str(key)} if variable else os.environ
    run = subprocess.run(
        [SWELL, *flags, *given, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment,
    )
    assert run.returncode == 1
    assert "0 bytes and needs at least 16" in run.stderr
    assert "Traceback" not in run.stderr
