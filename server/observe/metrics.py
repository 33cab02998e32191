"""Prometheus metrics of a front end.

What front ends do (tokens, latencies, routing) is counted by them, through `prometheus_client`:
in its multiprocess mode, when `PROMETHEUS_MULTIPROC_DIR` is set before this module is imported,
one scrape of any front end sums all of the node's, ended ones included. What engines report is
read from the cluster view when somebody scrapes: every front end has the same view, so nothing
is summed twice.
"""

import os
import re
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector

from engine.shared.model_files import served_names
from server.config import FrontEndConfig
from server.observe.engine_metrics import Ages, EngineCollector
from server.observe.exposition import text_of
from server.observe.metric_factory import LabelledCounter, MetricFactory
from server.observe.sequence_metrics import PromptParams, SequenceMetrics, SequenceTimer
from server.router.engine_times import EngineTimes
from server.router.generation_client import GenerationClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREPROCESS_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_WAKE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class FrontEndMetrics:
    """All metrics of one front-end process, and what a scrape of it shows."""

    def __init__(self, config: FrontEndConfig, index: int | None = None) -> None:
        """Register all metrics under names that begin with the configured prefix.

        With an `index` a front end goes on with the counts of its predecessors of this number,
        in their files: those of a node that replaces front ends for years stay as few.

        Raises:
            ValueError: the prefix cannot begin a Prometheus name.
        """
        self._prefix = config.http.metrics_prefix
        self._model_name = served_names(config.model)[0]
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*|", self._prefix):
            raise ValueError(
                f"metrics prefix {self._prefix!r} cannot begin a Prometheus metric name"
            )
        multiprocess = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if multiprocess and index is not None:
            values.ValueClass = values.MultiProcessValue(  # type: ignore[no-untyped-call]
                lambda: f"api-{index}"
            )
        registry = CollectorRegistry()
        factory = MetricFactory(self._prefix, self._model_name, registry)
        self._sequences = SequenceMetrics(factory)
        self._preprocess_time = factory.histogram(
            "request_preprocess_time_seconds",
            "Time from the arrival of a request until it is sent to an engine.",
            _PREPROCESS_BUCKETS,
        )
        self._wake_latency = factory.histogram(
            "wake_latency_seconds",
            "Time from a request sent to paused engines to evidence that they run.",
            _WAKE_BUCKETS,
        )
        self._resumed = factory.counter(
            "requests_resumed", "Requests that continued on another engine after theirs was lost."
        )
        self._routing = factory.by_label(
            "routing_decisions", "Sequences routed, by engine and reason.", "engine", "reason"
        )
        self._http = factory.by_label(
            "http_requests", "Answers by endpoint and HTTP status.", "endpoint", "status"
        )
        self._forwarded = factory.by_label(
            "forwarded_requests", "Answers of other servers, by their model.", "model", "status"
        )
        self._adapters = [
            factory.by_label(name, text, "lora_name")
            for name, text in (
                ("lora_requests", "Requests that were answered with an adapter."),
                ("lora_prompt_tokens", "Prompt tokens of requests for an adapter."),
                ("lora_generation_tokens", "Tokens generated with an adapter."),
            )
        ]
        self._keys = [
            factory.by_label(name, text, "key")
            for name, text in (
                ("key_requests", "Requests that engines worked on, by the name of the API key."),
                ("key_prompt_tokens", "Prompt tokens of requests, by the name of the API key."),
                ("key_generation_tokens", "Generated tokens, by the name of the API key."),
            )
        ]
        self._exposed = registry
        if multiprocess:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed)  # type: ignore[no-untyped-call]

    def http_request(self, endpoint: str, status: int) -> None:
        """An endpoint answered with a status."""
        self._http.child(endpoint, status).inc()

    def forwarded(self, model: str, status: int) -> None:
        """Another server, that of a model, answered with a status."""
        self._forwarded.child(model, status).inc()

    def submitted(self, arrived: float) -> None:
        """A request that arrived at `arrived` (monotonic seconds) has gone to the engines."""
        self._preprocess_time.observe(time.monotonic() - arrived)

    def sequence(
        self, arrived: float, params: PromptParams, times: EngineTimes, *, first: bool = False
    ) -> SequenceTimer:
        """Return what measures a sequence, the first or another of a request of that time."""
        if first:
            self.submitted(arrived)
        return SequenceTimer(self._sequences, arrived, params, times)

    def routing_decision(self, rank: int, reason: str) -> None:
        """A sequence was sent to engine `rank` because of `reason`."""
        self._routing.child(rank, reason).inc()

    def adapter_used(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """A request with an adapter has ended."""
        _count(self._adapters, name, prompt_tokens, generation_tokens)

    def key_used(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """A request with an API key of this name has ended; nothing counts without keys."""
        if name:
            _count(self._keys, name, prompt_tokens, generation_tokens)

    def request_resumed(self) -> None:
        """A sequence went on in another engine."""
        self._resumed.inc()

    def observe_wake(self, seconds: float) -> None:
        """Paused engines ran `seconds` after a request was sent to them."""
        self._wake_latency.observe(seconds)

    def first_token_times(self) -> tuple[float, int]:
        """Return the sum (seconds) and the number of the node's times to first token."""
        self._sequences.flush()
        name = f"{self._prefix}time_to_first_token_seconds"
        sums = {f"{name}_sum": 0.0, f"{name}_count": 0.0}
        for family in self._exposed.collect():
            if family.name == name:
                for sample in family.samples:
                    if sample.name in sums:
                        sums[sample.name] += sample.value
        return sums[f"{name}_sum"], int(sums[f"{name}_count"])

    def scrape(self, client: GenerationClient) -> Callable[[], bytes]:
        """Return what makes the text of `render` as of now; it may be called in another thread."""
        self._sequences.flush()
        engines = self._engines(client, None)
        return lambda: generate_latest(self._exposed) + text_of(engines.collect())

    def render(self, client: GenerationClient) -> bytes:
        """Return all series in Prometheus text format: this node's and every engine's."""
        return self.scrape(client)()

    def render_engine(self, client: GenerationClient, rank: int) -> bytes | None:
        """Return the series of one engine; None if the view does not have it."""
        view = client.view
        if view is None or all(entry.rank != rank for entry in view.engines):
            return None
        return text_of(self._engines(client, rank).collect())

    def _engines(self, client: GenerationClient, rank: int | None) -> EngineCollector:
        ages = Ages(client.view_age, client.stats_age)
        return EngineCollector(self._prefix, self._model_name, client.view, ages, rank)


def _count(counters: list[LabelledCounter], name: str, *tokens: int) -> None:
    """Count one request, and tokens, under a name."""
    for counter, number in zip(counters, (1, *tokens), strict=True):
        counter.child(name).inc(number)
