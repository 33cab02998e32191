"""Prometheus metrics of a front end.

Front ends count their own work (tokens, latencies, routing) with `prometheus_client`. In its
multiprocess mode, active if `PROMETHEUS_MULTIPROC_DIR` is set before this module is imported, one
scrape of any front end sums all of the node's, including those that have exited. That mode maps a
file per process and metric type; the supervisor creates those of counters and histograms in memory.
A gauge here would need another file. Engine metrics are computed from the cluster view at each
scrape: every front end has the same view, so nothing is summed twice.
"""

import os
import re
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from engine.shared.model_files import served_names
from engine.shared.scope import node_name
from server.config import FrontEndConfig
from server.observe.engine_metrics import EngineCollector, shown_on
from server.observe.metric_factory import MetricFactory, text_of
from server.observe.sequence_metrics import PromptParams, SequenceMetrics, SequenceTimer
from server.router.generation_client import GenerationClient
from server.router.request import EngineTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS: dict[str, tuple[str, ...]] = {
    "admission_rejections": (
        "Requests refused with 429 before any work, by limit.", "reason",
    ),
    "api_server_restarts": ("API servers restarted because they died or hung.", "reason"),
    "forwarded_requests": ("Responses of other servers, by model and status.", "model", "status"),
    "held_request_seconds": (
        "Seconds that requests waited because there was no engine (--cold-start-timeout).",
    ),
    "http_requests": ("Answers by endpoint and HTTP status.", "endpoint", "status"),
    "image_pixel_bytes": ("Bytes of pixels of images in the form sent to engines.",),
    "image_refusals": ("Requests refused because of their images, by reason.", "reason"),
    "image_tokens": ("Prompt tokens of images prepared for engines.",),
    "images": (
        "Images prepared for engines, counted once per occurrence in a request.",
    ),
    "key_generation_tokens": ("Generated tokens, by the name of the API key.", "key"),
    "key_prompt_tokens": ("Prompt tokens of requests, by the name of the API key.", "key"),
    "key_requests": (
        "Requests that engines worked on, by the name of the API key.", "key",
    ),
    "lora_generation_tokens": ("Tokens generated with an adapter.", "lora_name"),
    "lora_prompt_tokens": ("Prompt tokens of requests for an adapter.", "lora_name"),
    "lora_requests": ("Requests that were answered with an adapter.", "lora_name"),
    "mm_cache_hits": ("Images of mm_cache_queries that the engine already had.",),
    "mm_cache_queries": (
        "Images of sequences sent to engines; an image that the engine has is not sent again.",
    ),
    "requests_resumed": (
        "Requests that continued on another engine after theirs was lost.",
    ),
    "response_store_evictions": (
        "Stored responses and conversations deleted for lack of room or for their age.",
        "reason",
    ),
    "responses_not_kept": ("Responses that could not be stored as requested.",),
    "routing_decisions": ("Sequences routed, by engine and reason.", "engine", "reason"),
    "routing_expected_cached_tokens": (
        "Prompt tokens that engines were expected to have cached, by prefix-aware routing.",
    ),
    "routing_found_cached_tokens": (
        "Prompt tokens of the same requests that engines did have cached.",
    ),
    "routing_index_resyncs": (
        "Times that an engine resent the list of its KV blocks, after a reset or lost changes.",
    ),
    "tool_call_parser_invocations": (
        "Answers parsed for tool calls, by parser.", "parser",
    ),
}  # fmt: skip
"""Help text and labels of each counter, by name."""

_PREPROCESS_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_TIMES: dict[str, tuple[str, tuple[float, ...]]] = {
    "event_loop_lag_seconds": (
        "Delay of the event loop's timer in an API server, measured once a second.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    ),
    "image_prepare_time_seconds": (
        "Time to fetch, decode and resize all images of a request.",
        _PREPROCESS_BUCKETS,
    ),
    "request_preprocess_time_seconds": (
        "Time from the arrival of a request until it is sent to an engine.", _PREPROCESS_BUCKETS,
    ),
    "wake_latency_seconds": (
        "Time from sending a request to paused engines until they report running.",
        (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
    ),
}  # fmt: skip
"""Help text and buckets of each histogram, by name."""


class FrontEndMetrics:
    """All metrics of one front-end process."""

    def __init__(self, config: FrontEndConfig, slot: int | None = None) -> None:
        """Register all metrics with the configured name prefix.

        Args:
            slot: the front end's index on its node; the counters of its earlier processes, in
                memory held by the supervisor, are continued.

        Raises:
            ValueError: the prefix is not valid in a Prometheus name.
        """
        self._prefix = config.http.metrics_prefix
        self._model_name = served_names(config.model)[0]
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*|", self._prefix):
            raise ValueError(
                f"metrics prefix {self._prefix!r} cannot begin a Prometheus metric name"
            )
        multiprocess = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if multiprocess and slot is not None:
            values.ValueClass = values.MultiProcessValue(  # type: ignore[no-untyped-call]
                lambda: f"api-{slot}"
            )
        registry = CollectorRegistry()
        factory = MetricFactory(self._prefix, self._model_name, registry)
        self._max_engines = config.http.metrics_engines
        self._host = node_name(config.cluster)
        self._sequences = SequenceMetrics(factory, self._max_engines)
        self._counters = {
            name: factory.counter(name, *described) for name, described in _COUNTERS.items()
        }
        self._times = {
            name: factory.histogram(name, text, buckets).child()
            for name, (text, buckets) in _TIMES.items()
        }
        for reason in ("died", "hung"):
            self.count("api_server_restarts", reason, by=0)  # create the series
        self.store_usage: Callable[[], tuple[int, int]] | None = None
        """Returns the stored bytes and their limit; None if responses are not stored."""
        self.index_size: Callable[[], int] | None = None
        """Returns the number of indexed KV blocks; None without prefix-aware routing."""
        self._exposed = registry
        if multiprocess:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed)  # type: ignore[no-untyped-call]

    def count(self, name: str, *labels: str | int, by: float = 1) -> None:
        """Increment a counter of `_COUNTERS` with these labels."""
        self._counters[name].child(*labels).inc(by)

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration in a histogram of `_TIMES`."""
        self._times[name].observe(seconds)

    def replaces(self, replaced: Mapping[str, int]) -> None:
        """Raise the restart counters to the number of earlier processes, by how they ended.

        Some of them may have died before they counted anything.
        """
        for reason, count in replaced.items():
            counter = self._counters["api_server_restarts"].child(reason)
            (family,) = counter.collect()
            counter.inc(max(0.0, count - family.samples[0].value))

    def submitted(self, arrived: float) -> None:
        """Record that a request was sent to engines; `arrived` is in monotonic seconds."""
        self.observe("request_preprocess_time_seconds", time.monotonic() - arrived)

    def sequence(
        self, arrived: float, params: PromptParams, times: EngineTimes, *, first: bool = False
    ) -> SequenceTimer:
        """Return a timer for a sequence; `first` is the first one of its request."""
        if first:
            self.submitted(arrived)
        return SequenceTimer(self._sequences, arrived, params, times)

    def used(self, kind: str, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count a finished request by its API key's or adapter's name; an empty name is ignored.

        `kind` is "key" or "lora".
        """
        if name:
            self.count(f"{kind}_requests", name)
            self.count(f"{kind}_prompt_tokens", name, by=prompt_tokens)
            self.count(f"{kind}_generation_tokens", name, by=generation_tokens)

    def first_token_times(self) -> tuple[float, int]:
        """Return the sum (seconds) and count of the node's times to first token."""
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
        """Return a thread-safe function that formats the metrics as of now."""
        self._sequences.flush()
        engines = self._engines(client, None)
        own = []
        if self.store_usage is not None:
            kept, limit = self.store_usage()
            text = "Bytes of stored responses and conversations."
            own.append(self._gauge("response_store_bytes", text, kept))
            own.append(
                self._gauge("response_store_limit_bytes", "Maximum of response_store_bytes.", limit)
            )
        if self.index_size is not None:
            text = (
                "KV blocks of engines that this API server has indexed, for prefix-aware routing."
            )
            own.append(self._gauge("routing_index_blocks", text, self.index_size()))

        def render() -> bytes:
            return generate_latest(self._exposed) + text_of([*own, *engines.collect()])

        return render

    def render(self, client: GenerationClient) -> bytes:
        """Return all series in Prometheus text format: this node's and all engines'."""
        return self.scrape(client)()

    def render_engine(self, client: GenerationClient, rank: int) -> bytes | None:
        """Return the series of one engine; None if it is not in the view."""
        view = client.view
        if view is None or all(entry.rank != rank for entry in view.engines):
            return None
        return text_of(self._engines(client, rank).collect())

    def _gauge(self, name: str, text: str, value: int) -> Metric:
        gauge = GaugeMetricFamily(self._prefix + name, text, labels=("model_name",))
        gauge.add_metric((self._model_name,), value)
        return gauge

    def _engines(self, client: GenerationClient, rank: int | None) -> EngineCollector:
        view = client.view
        ranks = None if rank is None else frozenset([rank])
        if view is not None and rank is None and len(view.engines) > self._max_engines:
            ranks = shown_on(self._host, view)
        return EngineCollector(
            self._prefix,
            self._model_name,
            view,
            client.view_age,
            client.stats_age,
            ranks,
            shows_cluster=rank is None,
        )
