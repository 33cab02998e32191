"""A coordinator's node is lost, and another takes over at another address behind the same name."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.deploy.namespaces import Network, network_or_skip
from tests.deploy.test_several_nodes import SIMULATED, Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

NAME = "swell-coordinator"
API, NEAR, FAR, LOST, NEXT = range(5)
QUESTIONS = 16


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(5) as made:
        yield made


@contextmanager
def load(cluster: Cluster, clients: int) -> Iterator[list[str]]:
    """Have clients ask all the while; yields what has been answered, which has to be right."""
    right = [cluster.complete(seed, 30) for seed in range(QUESTIONS)]
    answers: list[str] = []
    failures: list[Exception] = []
    seeds = itertools.cycle(range(QUESTIONS))
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            seed = next(seeds)
            try:
                answer = cluster.complete(seed, 30)
                assert answer == right[seed], f"question {seed} was answered otherwise"
                answers.append(answer)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []


def test_a_coordinator_at_another_address_takes_over_within_seconds_under_load(
    network: Network, tmp_path: Path
) -> None:
    network.name(NAME, LOST)
    with ExitStack() as running:
        cluster = Cluster(network, tmp_path, running, coordinator=LOST, name=NAME)
        cluster.engine(NEAR, 0, *SIMULATED)
        cluster.engine(FAR, 1, *SIMULATED)
        cluster.wait_for_engines(0, 1)
        with load(cluster, 8) as answers:
            until(lambda: len(answers) > 20, "answers come")
            network.cut(LOST)
            network.name(NAME, NEXT)
            successor = cluster.coordinate(NEXT)
            began = time.monotonic()
            for member in ("engine 0", "engine 1", "front end 0", "front end 1"):
                until(lambda: successor.said(f"{member} is ready"), f"{member} is back")  # noqa: B023
            took = time.monotonic() - began
            before = len(answers)
            cluster.engine(NEAR, 2, *SIMULATED)
            cluster.wait_for_engines(0, 1, 2)
            until(lambda: cluster.running_on(2) > 0, "the new engine gets requests")
            until(lambda: len(answers) > before + 20, "answers come")
        network.restore(LOST)
    print(f"{len(answers)} answers, none failed or wrong; everybody was back after {took:.1f} s")
