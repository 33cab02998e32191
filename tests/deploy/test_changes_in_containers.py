"""A month of cluster changes, applied to containers under load: no answer fails or differs.

Containers run as a user of the cluster's choice. What Kubernetes would do is done here by hand: an
autoscaler asks a real Prometheus and starts engines, a secret's files are exchanged as the kubelet
does it, a pod that is lost is removed without a word.
"""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.conftest import Compose
from tests.deploy.containers import Container, Fleet, say
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_alerts_stack import LABELS
from tests.deploy.test_chart import scaled_object
from tests.support.http import fetch
from tests.support.load import Load
from tests.support.metrics import metric
from tests.support.waiting import PATIENCE, until
from tests.test_key_exchange_stack import NEW, OLD, Secret

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

SLOTS, CLIENTS, FRONT_ENDS = 4, 12, 2
STARTING = 3 * PATIENCE
"""Maximum seconds for containers with torch to start on a busy machine."""
COORDINATOR = "coordinator"
FIRST, SECOND = "secret-of-clients", "next-secret-of-clients"
SIMULATED = ("--executor", "simulated", "--simulated-step-us", "10000")
CLUSTER_KEYS, API_KEYS = "cluster keys were reloaded", "] keys were reloaded"


def ready(front: Container) -> str:
    """Wait until all processes of an API server accept requests; return its URL.

    They share a port, so that `/ready` tells of one of them, the one that happens to be asked.
    """
    say([front], "swell is ready", within=STARTING)
    return front.url


def shared_directory(path: Path) -> Path:
    """Return a new directory that every user may read."""
    path.mkdir()
    path.chmod(0o755)
    return path


class Stack:
    """A coordinator, two engines and an API server with the keys of a secret."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.coordinator = self.coordinate()
        self.engines = [self.engine(), self.engine()]
        self.front = self.api()

    def coordinate(self) -> Container:
        return self._fleet.start(
            "coordinator", "--coordinator", "*:7550", "--advertise-host", COORDINATOR,
            alias=COORDINATOR,
        )  # fmt: skip

    def engine(self) -> Container:
        join = ("--coordinator", f"{COORDINATOR}:7550", "--max-num-seqs", str(SLOTS))
        return self._fleet.start("engine", *join, *SIMULATED)

    def api(self) -> Container:
        return self._fleet.start(
            "api-server", "--coordinator", f"{COORDINATOR}:7550", "--open-metrics",
            "--api-key-file", "/keys/data/api", "--api-server-count", str(FRONT_ENDS),
            "--min-ready-engines", "2",
        )  # fmt: skip

    def scale_as_recommended(self, prometheus: Prometheus) -> float:
        """Scale like KEDA and the autoscaler; return the seconds until the load was reported."""
        spec = scaled_object(
            f"engine.env.SWELL_MAX_NUM_SEQS={SLOTS}", "engine.autoscaling.maxReplicas=4"
        )
        (trigger,) = spec["triggers"]
        query, threshold = trigger["metadata"]["query"], float(trigger["metadata"]["threshold"])
        most: int = spec["maxReplicaCount"]
        began = time.monotonic()
        # The autoscaler rounds up, so any load above that of `most - 1` engines suffices.
        prometheus.wait(f"({query}) > {threshold} * {most - 1}")
        took = time.monotonic() - began
        self.engines += [self.engine() for _ in range(most - len(self.engines))]

        def all_run() -> bool:
            running = metric(self.front.url, "num_requests_running")
            return sum(number > 0 for number in running.values()) == most

        until(all_run, f"{most} engines have requests", STARTING, interval=0.2)
        return took

    def lose_an_engine(self, prometheus: Prometheus) -> float:
        """Remove an engine permanently; return the seconds until Prometheus showed it."""
        began = time.monotonic()
        self.engines.pop(0).remove()
        prometheus.wait('swell_engine_missing_seconds{reason="silent"} >= bool 0')
        return time.monotonic() - began

    def exchange_keys(self, secret: Secret, load: Load) -> float:
        """Replace both keys, then the engines; return the seconds until all had read the keys."""
        listening = [self.coordinator, self.front]
        began = time.monotonic()
        secret.show(cluster=OLD, accepted=NEW, api=f"{FIRST}\n{SECOND}\n")
        say(listening, CLUSTER_KEYS, 1)
        say([self.front], CLUSTER_KEYS, FRONT_ENDS)
        say([self.front], API_KEYS, FRONT_ENDS)
        took = time.monotonic() - began
        load.turn_to(self.front.url, SECOND)
        secret.show(cluster=NEW, accepted=OLD, api=f"{SECOND}\n")
        say([self.coordinator], CLUSTER_KEYS, 2)
        say([self.front], CLUSTER_KEYS, 2 * FRONT_ENDS)
        say([self.front], API_KEYS, 2 * FRONT_ENDS)
        assert fetch(f"{self.front.url}/v1/models", key=FIRST).status == 401
        old, self.engines = self.engines, [self.engine(), self.engine()]
        for engine in self.engines:
            until(lambda: fetch(engine.health).status == 200, "it is ready", STARTING)  # noqa: B023
        load.goes_on()
        for engine in old:
            engine.stop()
        load.goes_on()
        return took

    def move_the_coordinator(self) -> float:
        """Disconnect it and start another elsewhere; return the seconds until all had rejoined."""
        lost, address = self.coordinator, self.coordinator.address
        began = time.monotonic()
        self._fleet.cut_off(lost)
        self.coordinator = self.coordinate()
        assert self.coordinator.address != address
        say([self.front], "registered again", FRONT_ENDS)
        say(self.engines, "registered again", 1)
        return time.monotonic() - began


def test_load_failures_and_key_changes_cause_no_wrong_or_failed_answers(
    project: Compose, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    keys = shared_directory(tmp_path / "keys")
    secret = Secret(keys, cluster=OLD, api=f"{FIRST}\n")
    with ExitStack() as running:
        fleet = Fleet(
            project.docker, running, ("-v", f"{keys}:/keys:ro"),
            ("--cluster-key-file", "/keys/data/cluster", "--engine-timeout", "3",
             "--accepted-cluster-key-file", "/keys/data/accepted", "--heartbeat-interval", "0.3"),
        )  # fmt: skip
        stack = Stack(fleet)
        url = ready(stack.front)
        prometheus = Prometheus(tmp_path, url.removeprefix("http://"), labels=LABELS)
        running.callback(prometheus.stop)
        prometheus.wait("swell_engines_ready == 2")
        with Load(url, CLIENTS, FIRST).running() as load:
            scaled = stack.scale_as_recommended(prometheus)
            lost = stack.lose_an_engine(prometheus)
            load.goes_on()
            known = stack.exchange_keys(secret, load)
            moved = stack.move_the_coordinator()
            load.goes_on()
            old, stack.front = stack.front, stack.api()
            load.turn_to(ready(stack.front), SECOND)
            old.stop()
            load.goes_on()
            secret.show(cluster=NEW, api=f"{SECOND}\n")
            say([stack.front], CLUSTER_KEYS, FRONT_ENDS)
            load.goes_on()
        load.check()
    print(
        f"{load.count} answers, none failed or wrong; the autoscaler was told of the load after "
        f"{scaled:.1f} s, Prometheus of the lost engine after {lost:.1f} s, keys were known after "
        f"{known:.1f} s, everybody was with the new coordinator after {moved:.1f} s"
    )
