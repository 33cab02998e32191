"""The autoscaler's query as rendered by the chart, run on a real Prometheus that scrapes a stack.

KEDA passes what the query gives to an autoscaler of Kubernetes, which divides it by the threshold
and rounds up; without an answer KEDA keeps what runs (`fallback`).
"""

import math
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_alerts_stack import LABELS
from tests.deploy.test_chart import scaled_object
from tests.support.commands import coordinator, swell
from tests.support.http import completion, fetch
from tests.support.metrics import num_running
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

SLOTS, ENGINES = 4, 2
LONG = 900
"""Tokens of a request that outlives the test's look at it, at 200 ms each."""


class Scaler:
    """Evaluates a ScaledObject's trigger like KEDA and the autoscaler."""

    def __init__(self, prometheus: Prometheus, spec: dict[str, Any]) -> None:
        (trigger,) = spec["triggers"]
        self._prometheus = prometheus
        self._query: str = trigger["metadata"]["query"]
        self._threshold = float(trigger["metadata"]["threshold"])
        self._least, self._most = spec["minReplicaCount"], spec["maxReplicaCount"]
        assert trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["ignoreNullValues"] == "false", "nothing is not zero"

    def value(self) -> float:
        """Return the query's value; nan if it has none."""
        return self._prometheus.value(self._query)

    def wanted(self) -> int | None:
        """Return the desired number of engines; None: unchanged."""
        value = self.value()
        if math.isnan(value):
            return None
        return int(min(self._most, max(self._least, math.ceil(value / self._threshold))))


def test_full_engines_scale_up_idle_ones_down_and_missing_metrics_neither(
    tmp_path: Path,
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    ports = [free_port(), free_port()]
    with ExitStack() as running:
        join = running.enter_context(coordinator(tmp_path, "--engine-timeout", "3"))

        def engine() -> None:
            running.enter_context(
                swell("engine", *join, "--executor", "simulated", "--simulated-step-us", "200000",
                      "--max-num-seqs", str(SLOTS), "--drain-timeout", "1")
            )  # fmt: skip

        def api(port: int) -> ExitStack:
            own = running.enter_context(ExitStack())
            flags = ("--port", str(port), "--min-ready-engines", "1", "--shutdown-timeout", "1")
            own.enter_context(
                RunningStack(*join, "--api-server-count", "2", *flags, command="api-server")
            )
            return own

        for _ in range(ENGINES):
            engine()
        first, second = (api(port) for port in ports)
        url, other = (f"http://127.0.0.1:{port}" for port in ports)
        prometheus = Prometheus(tmp_path, *(f"127.0.0.1:{port}" for port in ports), labels=LABELS)
        running.callback(prometheus.stop)
        scaler = Scaler(
            prometheus,
            scaled_object(
                f"engine.env.SWELL_MAX_NUM_SEQS={SLOTS}", "engine.autoscaling.minReplicas=1",
                "engine.autoscaling.maxReplicas=8", "engine.autoscaling.targetUtilization=0.8",
            ),
        )  # fmt: skip
        prometheus.wait(f"min(swell_engines_ready) == {ENGINES}")
        until(lambda: scaler.wanted() == 1, "idle engines: the least is wanted", interval=0.3)

        clients = []
        for number in range(SLOTS * ENGINES):
            body = completion(f"Act {number}", LONG)
            client = threading.Thread(target=fetch, args=(f"{url}/v1/completions", body))
            client.start()
            clients.append(client)
            # Sequentially, so that front ends know the load of the engines.
            until(lambda: num_running(url) == number + 1, "it runs")  # noqa: B023
        # All slots are in use and nothing waits; both API servers export all engines.
        full = 100 * ENGINES
        until(lambda: scaler.value() == full, "as much work as engines", interval=0.3)
        prometheus.wait("count(swell_num_requests_running == 4) == bool 4")
        prometheus.wait("sum(swell_num_requests_waiting) == bool 0")
        assert scaler.wanted() == 3

        second.close()
        prometheus.wait("sum(up) == bool 1")
        assert (scaler.value(), scaler.wanted()) == (full, 3), "one API server less: the same"

        first.close()
        prometheus.wait("sum(up) == bool 0")
        until(lambda: scaler.wanted() is None, "without metrics nothing is wanted", interval=0.3)
        for client in clients:
            client.join()

        api(ports[1])
        prometheus.wait("sum(up) == bool 1")
        until(lambda: scaler.wanted() == 1, "what runs is known again", interval=0.3)
        assert fetch(f"{other}/v1/completions", completion("Act 0", 5)).status == 200


def test_first_request_starts_an_engine_and_waits(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as running:
        join = running.enter_context(coordinator(tmp_path, "--engine-timeout", "3"))
        flags = ("--port", str(port), "--cold-start-timeout", "300", "--shutdown-timeout", "1")
        running.enter_context(RunningStack(*join, *flags, command="api-server"))
        prometheus = Prometheus(tmp_path, f"127.0.0.1:{port}", labels=LABELS)
        running.callback(prometheus.stop)
        scaler = Scaler(prometheus, scaled_object("engine.autoscaling.minReplicas=0"))
        until(lambda: scaler.value() == 0, "no engine is wanted", interval=0.3)
        assert scaler.wanted() == 0
        assert fetch(f"{url}/ready").status == 200, "requests have to reach it"

        answers: list[int] = []

        def ask() -> None:
            answers.append(fetch(f"{url}/v1/completions", completion("Act 0", 5)).status)

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: scaler.wanted() == 1, "the request wants an engine", interval=0.3)
        assert not answers
        running.enter_context(swell("engine", *join, "--drain-timeout", "1"))
        client.join()
        assert answers == [200]
