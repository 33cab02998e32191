"""A coordinator's node is lost; another takes over at a new address behind the same name."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.namespaces import Network, network_or_skip
from tests.deploy.test_several_nodes import SIMULATED, Cluster
from tests.support.load import Load
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

NAME = "swell-coordinator"
API, NEAR, FAR, LOST, NEXT = range(5)


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip(5) as made:
        yield made


def test_a_coordinator_at_another_address_takes_over_within_seconds_under_load(
    network: Network, tmp_path: Path
) -> None:
    network.name(NAME, LOST)
    with ExitStack() as running:
        cluster = Cluster(network, tmp_path, running, coordinator=LOST, name=NAME)
        cluster.engine(NEAR, 0, *SIMULATED)
        cluster.engine(FAR, 1, *SIMULATED)
        cluster.wait_for_engines(0, 1)
        with Load(cluster.url, 8).running() as load:
            load.goes_on()
            network.cut(LOST)
            network.name(NAME, NEXT)
            successor = cluster.coordinate(NEXT)
            began = time.monotonic()
            for member in ("engine 0", "engine 1", "front end 0", "front end 1"):
                until(lambda: successor.said(f"{member} is ready"), f"{member} is back")  # noqa: B023
            took = time.monotonic() - began
            cluster.engine(NEAR, 2, *SIMULATED)
            cluster.wait_for_engines(0, 1, 2)
            until(lambda: cluster.running_on(2) > 0, "the new engine gets requests")
            load.goes_on()
        load.check()
        network.restore(LOST)
    print(f"{load.count} answers, none failed or wrong; everybody was back after {took:.1f} s")
