"""Prometheus metrics of a front end.

What front ends do (tokens, latencies, routing) is counted by them, through `prometheus_client`:
in its multiprocess mode, when `PROMETHEUS_MULTIPROC_DIR` is set before this module is imported,
one scrape of any front end sums all of the node's, ended ones included. That mode maps a file per
process and kind of metric; the supervisor makes those of counters and histograms in memory. A
gauge here would need one too. What engines report is
read from the cluster view at each scrape: every front end has the same view, so nothing is
summed twice.
"""

import os
import re
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
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
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAKE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class FrontEndMetrics:
    """All metrics of one front-end process, and what a scrape of it shows."""

    def __init__(self, config: FrontEndConfig, place: int | None = None) -> None:
        """Register all metrics under names that begin with the configured prefix.

        Args:
            config: of the front end.
            place: which of its node's front ends this is; it continues the counts of earlier
                processes in that place, which are in memory that the supervisor holds.

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
        if multiprocess and place is not None:
            values.ValueClass = values.MultiProcessValue(  # type: ignore[no-untyped-call]
                lambda: f"api-{place}"
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
        self._restarts = factory.by_label(
            "api_server_restarts", "API servers that replaced one that died or hung.", "reason"
        )
        for reason in ("died", "hung"):
            self._restarts.child(reason)  # so that the series is there, at 0
        self._rejections = factory.by_label(
            "admission_rejections",
            "Requests refused with 429 before any work, by the limit that they met.",
            "reason",
        )
        self._call_parsers = factory.by_label(
            "tool_call_parser_invocations",
            "Answers that a parser read for tool calls, by its name.",
            "parser",
        )
        self._loop_lag = factory.histogram(
            "event_loop_lag_seconds",
            "How late the event loop of an API server woke up, measured once a second.",
            _LAG_BUCKETS,
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
        self._evicted = factory.by_label(
            "response_store_evictions",
            "Kept responses and conversations that were deleted to make room, or for their age.",
            "reason",
        )
        self._not_kept = factory.counter(
            "responses_not_kept", "Responses that could not be stored as their request wanted."
        )
        self._images = factory.counter(
            "images", "Images that were prepared for engines, each as often as a request named it."
        )
        self._image_tokens = factory.counter(
            "image_tokens", "Prompt tokens that stand for images, counted as the images are."
        )
        self._image_bytes = factory.counter(
            "image_pixel_bytes", "Bytes of pixels that images had as engines take them."
        )
        self._image_time = factory.histogram(
            "image_prepare_time_seconds",
            "Time that it took to fetch, decode and resize all images of a request.",
            _PREPROCESS_BUCKETS,
        )
        self._image_refusals = factory.by_label(
            "image_refusals", "Requests refused because of their images, by reason.", "reason"
        )
        self.store_usage: Callable[[], tuple[int, int]] | None = None
        """Returns the bytes that are kept and their limit, if responses are kept."""
        self._exposed = registry
        if multiprocess:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed)  # type: ignore[no-untyped-call]

    def http_request(self, endpoint: str, status: int) -> None:
        """An endpoint answered with a status."""
        self._http.child(endpoint, status).inc()

    def replaces(self, replaced: Mapping[str, int]) -> None:
        """Say how many processes there were in this one's place, by what became of them.

        Some may have died before they counted anything.
        """
        for reason, count in replaced.items():
            counter = self._restarts.child(reason)
            (family,) = counter.collect()
            counter.inc(max(0.0, count - family.samples[0].value))

    def admission_rejected(self, reason: str) -> None:
        """A request was refused before any work."""
        self._rejections.child(reason).inc()

    def calls_looked_for(self, parser: str, answers: int) -> None:
        """Answers of a request with tools are read by a parser."""
        self._call_parsers.child(parser).inc(answers)

    def observe_loop_lag(self, seconds: float) -> None:
        """The event loop woke up this much later than it should have."""
        self._loop_lag.observe(seconds)

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

    def image_prepared(self, size: int, tokens: int) -> None:
        """An image has so many bytes of pixels and tokens as engines take it."""
        self._images.inc()
        self._image_bytes.inc(size)
        self._image_tokens.inc(tokens)

    def images_prepared(self, seconds: float) -> None:
        """All images of a request are prepared, after so long."""
        self._image_time.observe(seconds)

    def images_refused(self, reason: str) -> None:
        """A request was refused because of its images."""
        self._image_refusals.child(reason).inc()

    def store_evicted(self, reason: str) -> None:
        """A kept response or conversation was deleted because of age, limit or disk."""
        self._evicted.child(reason).inc()

    def response_not_kept(self) -> None:
        """A response could not be stored."""
        self._not_kept.inc()

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
        own = [] if self.store_usage is None else self._store_gauges(*self.store_usage())

        def text() -> bytes:
            return generate_latest(self._exposed) + text_of([*own, *engines.collect()])

        return text

    def render(self, client: GenerationClient) -> bytes:
        """Return all series in Prometheus text format: this node's and every engine's."""
        return self.scrape(client)()

    def render_engine(self, client: GenerationClient, rank: int) -> bytes | None:
        """Return the series of one engine; None if the view does not have it."""
        view = client.view
        if view is None or all(entry.rank != rank for entry in view.engines):
            return None
        return text_of(self._engines(client, rank).collect())

    def _store_gauges(self, kept: int, most: int) -> list[Metric]:
        gauges: list[Metric] = []
        for name, text, value in (
            ("response_store_bytes", "Bytes of kept responses and conversations.", kept),
            ("response_store_limit_bytes", "Bytes that may be kept.", most),
        ):
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            gauges.append(gauge)
        return gauges

    def _engines(self, client: GenerationClient, rank: int | None) -> EngineCollector:
        ages = Ages(client.view_age, client.stats_age)
        return EngineCollector(self._prefix, self._model_name, client.view, ages, rank)


def _count(counters: list[LabelledCounter], name: str, *tokens: int) -> None:
    """Count one request, and tokens, under a name."""
    for counter, number in zip(counters, (1, *tokens), strict=True):
        counter.child(name).inc(number)
