"""Queries of vLLM's dashboards, run on a real Prometheus that scrapes Swell under load.

The tables below say which metrics, labels and functions the panels of vLLM's dashboards use
(examples/observability: prometheus_grafana, performance_statistics, query_statistics, and the
vllm_* ones, as far as they apply).
"""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from benchmarks.running_stack import RunningStack
from scripts.check_dashboard import Finding, Query, ask, queries_of, substitute, table
from scripts.write_dashboard import TARGET
from tests.deploy.prometheus import Prometheus
from tests.support.http import MODEL
from tests.support.metrics import total
from tests.support.streams import stream_many
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

VARIABLES = {
    "__rate_interval": "10s", "__range": "1m", "model_name": MODEL, "Deployment_id": ".*",
    "job": ".*", "instance": ".+", "engine": ".+", "model": ".*",
}  # fmt: skip
ENGINES = 2
SLOTS = 4
CLIENTS = 24

Form = Callable[[str, str], list[str]]
"""Expressions with placeholders for a metric and a label selector."""


def quantiles(*shares: float, by: str = "le", over: str = "$__rate_interval") -> Form:
    def expressions(metric: str, labels: str) -> list[str]:
        buckets = f"sum by ({by}) (rate(vllm:{metric}_bucket{labels}[{over}]))"
        return [f"histogram_quantile({share}, {buckets})" for share in shares]

    return expressions


def rate(metric: str, labels: str) -> list[str]:
    return [f"rate(vllm:{metric}{labels}[$__rate_interval])"]


def gauge(metric: str, labels: str) -> list[str]:
    return [f"vllm:{metric}{labels}"]


def mean(metric: str, labels: str) -> list[str]:
    return [f"{rate(f'{metric}_sum', labels)[0]} / {rate(f'{metric}_count', labels)[0]}"]


def overall_mean(metric: str, labels: str) -> list[str]:
    total, count = (f"sum(increase(vllm:{metric}_{x}{labels}[$__range]))" for x in ("sum", "count"))
    return [f"{total} / {count}"]


def summed(function: str, by: str = "") -> Form:
    group = f" by ({by})" if by else ""
    return lambda metric, labels: [
        f"sum{group} ({function}(vllm:{metric}{labels}[$__rate_interval]))"
    ]


_FOUR = quantiles(0.99, 0.95, 0.9, 0.5)
_BY_MODEL = {"by": "le, model_name"}

MONITORING: list[tuple[str, str, list[Form]]] = [
    ("E2E Request Latency", "e2e_request_latency_seconds", [_FOUR, mean]),
    ("Token Throughput", "prompt_tokens_total", [rate]),
    ("Token Throughput", "generation_tokens_total", [rate]),
    ("Inter Token Latency", "inter_token_latency_seconds", [_FOUR, mean]),
    ("Time Per Output Token", "request_time_per_output_token_seconds", [_FOUR, mean]),
    ("Scheduler State", "num_requests_running", [gauge]),
    ("Scheduler State", "num_requests_waiting", [gauge]),
    ("Time To First Token Latency", "time_to_first_token_seconds", [_FOUR, mean]),
    ("Cache Utilization", "kv_cache_usage_perc", [gauge]),
    ("Request Prompt Length", "request_prompt_tokens_bucket", [summed("increase", "le")]),
    ("Request Generation Length", "request_generation_tokens_bucket", [summed("increase", "le")]),
    ("Finish Reason", "request_success_total", [summed("increase", "finished_reason")]),
    ("Queue Time", "request_queue_time_seconds_sum", [rate]),
    ("Prefill and Decode Time", "request_prefill_time_seconds_sum", [rate]),
    ("Prefill and Decode Time", "request_decode_time_seconds_sum", [rate]),
    ("Max Generation Token", "request_max_num_generation_tokens_sum", [rate]),
]
"""Select by model_name="..."."""

PERFORMANCE: list[tuple[str, str, list[Form]]] = [
    *(
        (title, metric, [mean, quantiles(0.99, 0.9, 0.5, over="$__range"), overall_mean])
        for title, metric in (
            ("E2E Latency", "e2e_request_latency_seconds"),
            ("TTFT", "time_to_first_token_seconds"),
            ("ITL", "inter_token_latency_seconds"),
        )
    ),
    ("TPS", "generation_tokens_total", [rate]),
    ("TPS", "prompt_tokens_total", [rate]),
    ("TPS", "iteration_tokens_total_count", [rate]),
]
"""Select nothing."""

STATISTICS: list[tuple[str, str, list[Form]]] = [
    ("Successful Requests", "request_success_total", [summed("rate", "model_name")]),
    ("Requests Avg Rate", "request_success_total", [summed("rate")]),
    ("Latency", "e2e_request_latency_seconds", [quantiles(0.5, 0.9, 0.99, **_BY_MODEL)]),
    ("Input Token Size", "request_prompt_tokens_bucket", [summed("rate", "le, model_name")]),
    ("Input Token Size", "request_prompt_tokens", [quantiles(0.5, 0.9, 0.99, **_BY_MODEL)]),
    ("Input Tokens", "prompt_tokens_total", [summed("rate", "model_name"), summed("rate")]),
    ("Output Tokens", "generation_tokens_total", [summed("rate", "model_name"), summed("rate")]),
]
"""Select by model_name=~"..."."""

OTHERS: list[tuple[str, str, list[Form]]] = [
    ("Phases", "request_queue_time_seconds", [quantiles(0.5, 0.95, 0.99), mean]),
    ("Phases", "request_prefill_time_seconds", [mean]),
    ("Phases", "request_decode_time_seconds", [mean]),
    ("Phases", "request_inference_time_seconds", [mean]),
    ("Scheduler Queue", "num_requests_waiting_by_reason", [gauge]),
    ("Tokens per Engine Step", "iteration_tokens_total", [quantiles(0.5, 0.99), mean]),
    ("Prompt Tokens by Source", "prompt_tokens_by_source_total", [summed("rate", "source")]),
    ("Prompt Tokens by Source", "prompt_tokens_cached_total", [rate]),
    ("Parameters", "request_params_n_sum", [rate]),
    ("Parameters", "request_params_max_tokens_sum", [rate]),
    ("Prefix Cache", "prefix_cache_queries_total", [rate]),
    ("Prefix Cache", "prefix_cache_hits_total", [rate]),
    ("Preemptions", "num_preemptions_total", [rate]),
]
"""Select by job, instance and engine too."""

_EVERYTHING = 'job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
_SELECTED = [
    ("monitoring", MONITORING, '{model_name="$model_name"}'),
    ("performance", PERFORMANCE, ""),
    ("statistics", STATISTICS, '{model_name=~"$Deployment_id"}'),
    ("others", OTHERS, f"{{{_EVERYTHING}}}"),
]
QUERIES = [
    Query(f"{name}: {title}", expression)
    for name, panels, labels in _SELECTED
    for title, metric, forms in panels
    for form in forms
    for expression in form(metric, labels)
] + [
    Query("others: Cache Config", 'vllm:cache_config_info{block_size!="", num_gpu_blocks!=""}'),
    Query(
        "statistics: Input Token Size Avg",
        "sum(rate(vllm:prompt_tokens_total[$__rate_interval])) / "
        "sum(rate(vllm:request_success_total[$__rate_interval]))",
    ),
]


class Load:
    """Runs more clients than the engines have slots while the context is active."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            bodies = [self._body(number + each) for each in range(2 * CLIENTS)]
            number += len(bodies)
            await stream_many(self._url, bodies, concurrency=CLIENTS)

    def _body(self, number: int) -> dict[str, Any]:
        prompt = f"KING HENRY, scene {number % 7}: good morrow to you all"
        length = 20 + number % 40
        return {"model": MODEL, "prompt": prompt, "max_tokens": length, "ignore_eos": True}

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join(60)


class Monitored:
    """A loaded stack, its Prometheus, and the results of all queries under load."""

    def __init__(self, url: str, prometheus: Prometheus) -> None:
        self.url = url
        self.prometheus = prometheus
        with Load(url):
            # Rates need two scrapes with the series in both, of requests that have ended.
            ended = "sum(increase(vllm:request_success_total[1m]))"
            prometheus.wait(f"{ended} > {4 * CLIENTS}")
            prometheus.wait(f"count(rate(vllm:request_params_n_sum[10s]) > 0) == {ENGINES}")
            self.findings = [ask(prometheus.url, query, VARIABLES) for query in QUERIES]
            # 24 clients for 8 slots: two of three requests wait, each for about two others, and an
            # overload shows as queue time, not as inference, as soon as no client is held up.
            prometheus.wait("sum(vllm:num_requests_waiting) > 0")
            queue, inference, whole = (
                f"sum(rate(vllm:{name}_seconds_sum[10s]))"
                f" / sum(rate(vllm:{name}_seconds_count[10s]))"
                for name in ("request_queue_time", "request_inference_time", "e2e_request_latency")
            )
            prometheus.wait(f"({queue}) > ({inference})")
            prometheus.wait(f"abs(({queue}) + ({inference}) - ({whole})) < 0.25 * ({whole})")

    def total(self, metric: str) -> float:
        """Return the sum of a counter over all engines, from the stack itself."""
        return total(self.url, metric, prefix="vllm:")


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    flags = ["--metrics-prefix", "vllm:", "--data-parallel-size", str(ENGINES)]
    flags += ["--api-server-count", "2", "--max-num-seqs", str(SLOTS)]
    with RunningStack(*flags) as stack:
        target = stack.url.removeprefix("http://")
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), target, variables=VARIABLES)
        try:
            yield Monitored(stack.url, prometheus)
        finally:
            prometheus.stop()
        stack.stop()


def test_every_panel_of_vllm_dashboards_has_data(monitored: Monitored) -> None:
    Console(width=180).print(table(monitored.findings))
    empty = [finding for finding in monitored.findings if not finding.values]
    assert not empty, empty


def test_series_by_engine_come_from_every_engine(monitored: Monitored) -> None:
    for query, values, _ in monitored.findings:
        if query.expression.startswith(("rate(", "vllm:")):
            assert len(values) == ENGINES * (2 if "_by_reason" in query.expression else 1), query


def test_counters_of_engines_and_front_ends_agree_when_idle(monitored: Monitored) -> None:
    until(lambda: monitored.total("num_requests_running") == 0, "the engines rest")

    def is_told() -> bool:
        return all(
            monitored.total(f"{each}_tokens_total")
            == monitored.total(f"engine_{each}_tokens_total")
            for each in ("generation", "prompt")
        )

    until(is_told, "engines and front ends count the same")
    generated = monitored.total("generation_tokens_total")
    prompts = monitored.total("prompt_tokens_total")
    cached = monitored.total("prefix_cache_hits_total")
    steps = monitored.total("iteration_tokens_total_sum")
    assert steps == generated + prompts - cached
    assert generated == monitored.total("request_generation_tokens_sum")
    assert prompts == monitored.total("request_prompt_tokens_sum")
    assert prompts == monitored.total("prompt_tokens_by_source_total")
    assert cached == monitored.total("prompt_tokens_cached_total")


def test_check_reads_nested_panels_and_reports_missing_data(monitored: Monitored) -> None:
    panel = {"title": "a", "targets": [{"expr": "vllm:nothing[${range}"}, {"refId": "B"}]}
    queries = list(queries_of([{"type": "row", "panels": [panel]}]))
    assert queries == [Query("a", "vllm:nothing[${range}")]
    url = monitored.prometheus.url
    assert ask(url, queries[0], {}) == Finding(queries[0], [], "no value for 'range'")
    assert "parse error" in str(ask(url, queries[0], {"range": "1m"}).error)
    assert ask(url, Query("", "vllm:nothing"), {}) == Finding(Query("", "vllm:nothing"), [])
    assert substitute("$a ${b:regex}", {"a": "1", "b": "2"}) == "1 2"


def test_every_panel_of_swell_dashboard_queries_existing_series(monitored: Monitored) -> None:
    own = json.loads(TARGET.read_text(encoding="utf-8"))["panels"]
    asked = [
        Query(each.panel, each.expression.replace("swell_", "vllm:")) for each in queries_of(own)
    ]
    findings = [ask(monitored.prometheus.url, query, VARIABLES) for query in asked]
    wrong = [finding for finding in findings if finding.error]
    # No engine was lost or put to sleep, so these rates are 0/0, which is NaN.
    missing = [finding.query for finding in findings if not finding.values]
    assert not wrong
    assert {query.panel for query in missing} <= {
        "From a request to evidence that engines run", "Falling asleep and waking up"
    }  # fmt: skip
