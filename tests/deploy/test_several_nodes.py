"""A cluster of three nodes, each in its own network namespace."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.namespaces import Network, network_or_skip
from tests.support.commands import SWELL
from tests.support.http import (
    are_replaced,
    call,
    complete,
    everywhere,
    fetch,
    incarnations,
    ready_ranks,
)
from tests.support.metrics import metric, total
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.deploy

HEAD, NEAR, FAR = range(3)
ENGINE_TIMEOUT = 2.0


class Process:
    """A swell process on a node, with its output."""

    def __init__(
        self,
        network: Network,
        node: int,
        *arguments: str,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            network.command(node, SWELL, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line.rstrip() for line in self._process.stdout)

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Stop it gracefully; idempotent."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._reader.join(60)
            assert self._process.stdout is not None
            self._process.stdout.close()


class Cluster:
    """A coordinator, an API server on the head node, and further processes.

    Processes reach the coordinator at `name`, or at the address of its node if there is no name.
    """

    def __init__(
        self,
        network: Network,
        directory: Path,
        running: ExitStack,
        coordinator: int = HEAD,
        name: str | None = None,
    ) -> None:
        self.network = network
        self._name = name or network.address(coordinator)
        self._running = running
        key = directory / "cluster.key"
        key.write_text("one long secret for all")
        self.flags = self.flags_with(key)
        self.url = f"http://{network.address(HEAD)}:8000"
        self.coordinator = self.coordinate(coordinator)
        self.api = self.start(
            HEAD, "api-server", *self.flags, "--host", "0.0.0.0", "--api-server-count", "2"
        )

    def flags_with(self, key: Path) -> tuple[str, ...]:
        return (
            "--coordinator", f"{self._name}:7550", "--cluster-key-file", str(key),
            "--engine-timeout", str(ENGINE_TIMEOUT), "--heartbeat-interval", "0.3",
        )  # fmt: skip

    def coordinate(self, node: int) -> Process:
        """Start a coordinator."""
        listen = ("--coordinator", "*:7550", "--node", f"node-{node}")
        return self._run(
            node, "coordinator", *self.flags[2:], *listen, "--advertise-host", self._name
        )

    def start(self, node: int, command: str, *arguments: str) -> Process:
        here = ("--node", f"node-{node}", "--advertise-host", self.network.address(node))
        return self._run(node, command, *arguments, *here)

    def _run(self, node: int, command: str, *arguments: str) -> Process:
        process = Process(self.network, node, command, *arguments)
        self._running.callback(process.close)
        return process

    def engine(self, node: int, rank: int, *arguments: str) -> Process:
        return self.start(
            node, "engine", *self.flags, "--data-parallel-rank", str(rank), *arguments
        )

    def ready_engines(self) -> dict[int, str]:
        """Return the node of each ready engine; empty if there is no response."""
        answer = fetch(f"{self.url}/status.json")
        engines = json.loads(answer.text)["engines"] if answer.status == 200 else []
        return {each["rank"]: each["host"] for each in engines if each["ready"]}

    def wait_for_engines(self, *ranks: int) -> None:
        until(
            lambda: everywhere(lambda: set(self.ready_engines()) == set(ranks)),
            f"engines {ranks} are ready",
        )

    def complete(self, seed: int, max_tokens: int = 40) -> str:
        return complete(self.url, f"Scene {seed}", max_tokens, seed=seed, temperature=1.0)

    def complete_all(self, count: int, max_tokens: int) -> list[str]:
        """Send this many requests concurrently; return their texts."""
        answers: dict[int, str] = {}

        def run(seed: int) -> None:
            answers[seed] = self.complete(seed, max_tokens)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert sorted(answers) == list(range(count)), "requests were lost"
        return [answers[seed] for seed in range(count)]

    def running_on(self, rank: int) -> float:
        """Return the number of running requests of an engine."""
        return metric(self.url, "num_requests_running").get(str(rank), 0.0)

    def runs(self) -> bool:
        """Return whether a wave is in progress."""
        return bool(call(f"{self.url}/status.json")["running"])


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_or_skip(3) as made:
        yield made


@pytest.fixture
def cluster(network: Network, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as running:
        yield Cluster(network, tmp_path, running)


SIMULATED = ("--executor", "simulated", "--simulated-step-us", "10000")


def test_engines_on_two_nodes_serve_front_end_on_third(cluster: Cluster) -> None:
    cluster.engine(NEAR, 0, *SIMULATED)
    cluster.engine(FAR, 1, *SIMULATED)
    cluster.wait_for_engines(0, 1)
    assert cluster.ready_engines() == {0: "node-1", 1: "node-2"}
    undisturbed = cluster.complete_all(16, 40)
    assert cluster.complete_all(16, 40) == undisturbed


def test_a_wrong_cluster_key_is_refused_and_named_on_both_sides(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.engine(NEAR, 0, *SIMULATED)
    cluster.wait_for_engines(0)
    wrong = tmp_path / "wrong.key"
    wrong.write_text("another secret, long enough")
    stranger = cluster.start(FAR, "engine", *cluster.flags_with(wrong), *SIMULATED)
    until(lambda: stranger.said("--cluster-key-file holds another key"), "the engine says it")
    until(lambda: cluster.coordinator.said("its cluster key is not ours"), "and its peer")
    cluster.complete_all(8, 20)
    cluster.wait_for_engines(0)


def test_cutting_and_restoring_a_link_under_load_loses_nothing(cluster: Cluster) -> None:
    cluster.engine(NEAR, 0, *SIMULATED)
    cluster.engine(FAR, 1, *SIMULATED)
    cluster.wait_for_engines(0, 1)
    undisturbed = cluster.complete_all(16, 300)
    disturbed: list[list[str]] = []
    load = threading.Thread(target=lambda: disturbed.append(cluster.complete_all(16, 300)))
    load.start()
    until(lambda: cluster.running_on(1) > 0, "the far engine has requests")
    cluster.network.cut(FAR)
    cluster.wait_for_engines(0)
    cluster.network.restore(FAR)
    load.join(90)
    assert disturbed == [undisturbed]
    cluster.wait_for_engines(0, 1)
    assert cluster.complete_all(16, 300) == undisturbed
    until(lambda: cluster.running_on(0) + cluster.running_on(1) == 0, "everything ended")


EXPERTS_APART = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")


def test_engines_of_two_nodes_share_the_experts_of_a_model(cluster: Cluster) -> None:
    cluster.engine(NEAR, 0, *EXPERTS_APART, "--threads", "1")
    cluster.engine(FAR, 1, *EXPERTS_APART, "--threads", "1")
    cluster.wait_for_engines(0, 1)
    together = cluster.complete_all(4, 30)
    until(lambda: not cluster.runs(), "the group pauses")
    before = total(cluster.url, "dummy_steps_total")
    assert cluster.complete(0, 30) == together[0]
    until(lambda: total(cluster.url, "dummy_steps_total") > before, "the idle engine stepped along")
    until(lambda: not cluster.runs(), "the group pauses again")


def test_an_engine_that_spans_two_nodes_outlives_a_cut_between_them(
    network: Network, tmp_path: Path
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text("one long secret for all")
    flags = (
        *("--data-parallel-size", "1", "--pipeline-parallel-size", "2", "--nnodes", "2"),
        *("--master-addr", network.address(HEAD), "--cluster-key-file", str(key)),
        *("--dtype", "float32", "--threads", "1", "--engine-timeout", str(ENGINE_TIMEOUT)),
    )
    url = f"http://{network.address(HEAD)}:8000"
    with ExitStack() as running:
        far = Process(network, FAR, "serve", *flags, "--node-rank", "1")
        running.callback(far.close)
        head = Process(network, HEAD, "serve", "--host", "0.0.0.0", *flags, "--node-rank", "0")
        running.callback(head.close)
        until(lambda: head.said("swell is ready"), "the engine is ready")
        undisturbed, before = complete(url, "Once", 40), incarnations(url, [0])
        network.cut(FAR)
        until(lambda: far.said("no message from the engine for 2 s"), "its workers end")
        until(lambda: not ready_ranks(url), "the engine has ended, too")
        network.restore(FAR)
        until(lambda: are_replaced(url, before, [0]), "the engine is back")
        assert complete(url, "Once", 40) == undisturbed
