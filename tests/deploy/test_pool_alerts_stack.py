"""Alerts when an inference gateway sends traffic to API servers in engine pods."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_chart import CHART, Manifest, find, render
from tests.support.commands import coordinator, swell
from tests.support.http import completion, fetch
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

REQUESTS = 120
"""More than the 100 requests that the burn-rate alerts require."""


def scrape_of(endpoint: Manifest) -> dict[str, Any]:
    """Return the scrape configuration that the Prometheus operator generates for an endpoint."""

    def rules(name: str) -> list[dict[str, Any]]:
        return [
            {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", key): rule for key, rule in each.items()}
            for each in endpoint.get(name, [])
        ]

    return {
        "relabel_configs": rules("relabelings"),
        "metric_relabel_configs": rules("metricRelabelings"),
    }


def test_late_first_tokens_behind_an_inference_gateway_raise_the_alert(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    manifests = render(
        CHART / "examples" / "inference-pool.yaml", "metrics.serviceMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
    )  # fmt: skip
    (endpoint,) = find(manifests, "PodMonitor", "demo-swell")["spec"]["podMetricsEndpoints"]
    rules = json.dumps(find(manifests, "PrometheusRule", "demo-swell")["spec"])
    with ExitStack() as running:
        join = running.enter_context(coordinator(tmp_path))
        slow = ("--executor", "simulated", "--simulated-step-us", "3000000")
        running.enter_context(
            swell("engine", *join, *slow, "--max-num-seqs", "128", "--data-parallel-rank", "0",
                  "--drain-timeout", "1")
        )  # fmt: skip
        # As in an engine pod.
        url = running.enter_context(
            RunningStack(
                *join, "--data-parallel-lb", "external", "--data-parallel-rank", "0",
                "--metrics-prefix", "vllm:", "--shutdown-timeout", "1", command="api-server",
            )
        ).url  # fmt: skip
        prometheus = Prometheus(
            tmp_path, url.removeprefix("http://"), labels={"namespace": "llm"},
            rules=rules.replace('"2m"', '"2s"').replace('"30s"', '"1s"'),
            scrape=scrape_of(endpoint),
        )  # fmt: skip
        running.callback(prometheus.stop)
        prometheus.wait('swell_engines_ready{service="demo-swell", job="demo-swell"} == 1')
        until(lambda: prometheus.firing() == {}, "no alert fires", interval=0.5)

        def ask(number: int) -> int:
            return fetch(f"{url}/v1/completions", completion(f"Act {number}", 1)).status

        with ThreadPoolExecutor(REQUESTS) as clients:
            assert set(clients.map(ask, range(REQUESTS))) == {200}
        until(lambda: "SwellTTFTBurnFast" in prometheus.firing(), "it fires", interval=0.5)
