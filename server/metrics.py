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
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine.messages import ClusterView, EngineEntry, EngineStats
from engine.model_files import served_names
from server.config import FrontEndConfig
from server.generation_client import GenerationClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_QUEUE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 480.0,
)  # fmt: skip
_WAKE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_COUNT_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip

_FLUSH_AFTER = 256


class _BufferedHistogram:
    """A histogram child whose observations are counted here and handed over in bulk.

    One observation of a memory-mapped histogram costs microseconds; there is one per token.
    """

    def __init__(self, child: Histogram, buckets: Iterable[float]) -> None:
        self._child: Any = child  # its parts have no public names
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._pending = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._pending += times
        if self._pending >= _FLUSH_AFTER:
            self.flush()

    def flush(self) -> None:
        """Make everything observed visible to scrapes of any process."""
        if not self._pending:
            return
        for index, count in enumerate(self._counts):
            if count:
                self._child._buckets[index].inc(count)
                self._counts[index] = 0
        self._child._sum.inc(self._sum)
        self._sum = 0.0
        self._pending = 0


class ChoiceTimer:
    """Measures one sequence, from the arrival of its request to its end."""

    __slots__ = ("_arrived", "_first", "_last", "_metrics", "_num_tokens")

    def __init__(self, metrics: "FrontEndMetrics", arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first = 0.0
        self._last = 0.0
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """The engine sent `count` more tokens."""
        if not count:
            return
        now = time.monotonic()
        metrics = self._metrics
        if self._num_tokens == 0:
            self._first = now
            metrics.time_to_first_token.observe(now - self._arrived)
        else:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        self._last = now
        self._num_tokens += count

    def finished(self, reason: str) -> None:
        """The sequence ended, for whatever reason."""
        metrics = self._metrics
        metrics.success(reason).inc()
        metrics.e2e_request_latency.observe(time.monotonic() - self._arrived)
        metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_tokens:
            metrics.generation_tokens.inc(self._num_tokens)
        if self._num_tokens > 1:
            per_token = (self._last - self._first) / (self._num_tokens - 1)
            metrics.time_per_output_token.observe(per_token)
            metrics.inter_token_latency.flush()


class FrontEndMetrics:
    """All metrics of one front-end process, and what a scrape of it shows."""

    def __init__(self, config: FrontEndConfig) -> None:
        """Register all metrics under names that begin with the configured prefix.

        Raises:
            ValueError: the prefix cannot begin a Prometheus name.
        """
        prefix, model_name = config.http.metrics_prefix, served_names(config.model)[0]
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*|", prefix):
            raise ValueError(f"metrics prefix {prefix!r} cannot begin a Prometheus metric name")
        self._prefix = prefix
        self._model_name = model_name
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return self._counter(name, text).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens accepted.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _LATENCY_BUCKETS,
        )
        self.inter_token_latency = _BufferedHistogram(
            histogram(
                "inter_token_latency_seconds",
                "Time between the tokens of a sequence as they reach the front end.",
                _TOKEN_LATENCY_BUCKETS,
            ),
            _TOKEN_LATENCY_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a sequence after its first.",
            _TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to its last token.",
            _REQUEST_BUCKETS,
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival to its being handed to an engine.",
            _QUEUE_BUCKETS,
        )
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens per prompt.", _COUNT_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated per sequence.", _COUNT_BUCKETS
        )
        self.wake_latency = histogram(
            "wake_latency_seconds",
            "Time from a request sent to paused engines to evidence that they run.",
            _WAKE_BUCKETS,
        )
        self.requests_resumed = counter(
            "requests_resumed", "Requests that went on in another engine after theirs was lost."
        )
        self._success_counter = self._counter(
            "request_success", "Sequences that ended, by reason.", "finished_reason"
        )
        self._routing_counter = self._counter(
            "routing_decisions", "Sequences routed, by engine and reason.", "engine", "reason"
        )
        self._http_counter = self._counter(
            "http_requests", "Answers by endpoint and HTTP status.", "endpoint", "status"
        )
        self._success: dict[str, Counter] = {}
        self._routing: dict[tuple[int, str], Counter] = {}
        self._http: dict[tuple[str, int], Counter] = {}
        for reason in ("stop", "length", "abort", "error"):
            self.success(reason)
        self._exposed = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed)  # type: ignore[no-untyped-call]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, ["model_name", *labels], registry=self._registry)

    # -- what happens --------------------------------------------------------------------------

    def success(self, reason: str) -> Counter:
        """Return the counter of sequences that ended for `reason`."""
        child = self._success.get(reason)
        if child is None:
            child = self._success[reason] = self._success_counter.labels(self._model_name, reason)
        return child

    def http_request(self, endpoint: str, status: int) -> None:
        """An endpoint answered with a status."""
        child = self._http.get((endpoint, status))
        if child is None:
            child = self._http_counter.labels(self._model_name, endpoint, str(status))
            self._http[endpoint, status] = child
        child.inc()

    def submitted(self, arrived: float, prompt_lengths: Iterable[int]) -> None:
        """A request that arrived at `arrived` (monotonic seconds) went to the engines."""
        self.request_queue_time.observe(time.monotonic() - arrived)
        for length in prompt_lengths:
            self.request_prompt_tokens.observe(length)
            self.prompt_tokens.inc(length)

    def routing_decision(self, rank: int, reason: str) -> None:
        """A sequence was sent to engine `rank` because of `reason`."""
        child = self._routing.get((rank, reason))
        if child is None:
            child = self._routing_counter.labels(self._model_name, str(rank), reason)
            self._routing[rank, reason] = child
        child.inc()

    def request_resumed(self) -> None:
        """A sequence went on in another engine."""
        self.requests_resumed.inc()

    def observe_wake(self, seconds: float) -> None:
        """Paused engines ran `seconds` after a request was sent to them."""
        self.wake_latency.observe(seconds)

    # -- what a scrape shows -------------------------------------------------------------------

    def render(self, client: GenerationClient) -> bytes:
        """Return all series in Prometheus text format: this node's and every engine's."""
        self.inter_token_latency.flush()
        return generate_latest(self._exposed) + self._render_engines(client, None)

    def render_engine(self, client: GenerationClient, rank: int) -> bytes | None:
        """Return the series of one engine; None if the view does not have it."""
        view = client.view
        if view is None or all(entry.rank != rank for entry in view.engines):
            return None
        return self._render_engines(client, rank)

    def _render_engines(self, client: GenerationClient, rank: int | None) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_EngineCollector(self._prefix, self._model_name, client, rank))
        return generate_latest(registry)


_EngineValue = Callable[[EngineStats], float]
_Samples = Iterable[tuple[tuple[str, ...], float]]

_ENGINE_GAUGES: tuple[tuple[str, str, _EngineValue], ...] = (
    ("num_requests_running", "Sequences that run.", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences that wait for a slot.", lambda stats: stats.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats: stats.kv_usage),
    (
        "queued_prefill_tokens",
        "Prompt tokens received and not yet computed.",
        lambda stats: stats.queued_prefill_tokens,
    ),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, _EngineValue], ...] = (
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_cache_queries_total,
    ),
    (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_cache_hits_total,
    ),
    (
        "num_preemptions",
        "Sequences preempted for lack of KV blocks.",
        lambda stats: stats.preemptions_total,
    ),
    (
        "engine_prompt_tokens",
        "Prompt tokens computed by the engine.",
        lambda stats: stats.prompt_tokens_total,
    ),
    (
        "engine_generation_tokens",
        "Tokens drawn by the engine.",
        lambda stats: stats.generation_tokens_total,
    ),
    (
        "dummy_steps",
        "Steps without work that keep a lockstep group together.",
        lambda stats: stats.dummy_steps_total,
    ),
)


class _EngineCollector(Collector):
    """What the newest cluster view says, of one rank or of all and the cluster."""

    def __init__(
        self, prefix: str, model_name: str, client: GenerationClient, rank: int | None
    ) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._client = client
        self._rank = rank

    def collect(self) -> Iterator[Metric]:
        view = self._client.view
        if view is None:
            return
        chosen = [entry for entry in view.engines if self._rank in (None, entry.rank)]
        reporting = [(entry, entry.stats) for entry in chosen if entry.stats is not None]
        for name, text, value in _ENGINE_GAUGES:
            samples = [(self._labels(entry), value(stats)) for entry, stats in reporting]
            yield self._gauge(name, text, ("model_name", "engine"), samples)
        for name, text, value in _ENGINE_COUNTERS:
            samples = [(self._labels(entry), value(stats)) for entry, stats in reporting]
            yield self._counter(name, text, ("model_name", "engine"), samples)
        yield from self._membership(chosen)
        if self._rank is None:
            yield from self._cluster(view)

    def _cluster(self, view: ClusterView) -> Iterator[Metric]:
        for name, text, number in (
            ("wave", "Number of the running period of the engines.", view.wave),
            ("engines_running", "1 while the engines run, 0 while paused.", view.running),
            ("engines_ready", "Engines that take requests.", sum(e.ready for e in view.engines)),
            ("front_ends", "Front ends registered.", view.num_front_ends),
        ):
            sample = ((self._model_name,), float(number))
            yield self._gauge(name, text, ("model_name",), [sample])
        wakeups = [
            ((self._model_name, source), float(count))
            for source, count in view.wakeups_total.items()
        ]
        text = "How often paused engines were woken."
        yield self._counter("wave_wakeups", text, ("model_name", "source"), wakeups)

    def _membership(self, chosen: list[EngineEntry]) -> Iterator[Metric]:
        labels = ("model_name", "engine")
        up = [(self._labels(entry), float(entry.ready)) for entry in chosen]
        yield self._gauge("engine_up", "1 while the engine takes requests.", labels, up)
        restarts = [(self._labels(entry), float(entry.restarts)) for entry in chosen]
        yield self._counter(
            "engine_restarts", "Starts of a rank after its first.", labels, restarts
        )
        age = self._client.stats_age
        ages = [(self._labels(entry), age[entry.rank]) for entry in chosen if entry.rank in age]
        text = "Seconds since the engine's newest stats came."
        yield self._gauge("stats_age_seconds", text, labels, ages)

    def _labels(self, entry: EngineEntry) -> tuple[str, str]:
        return (self._model_name, str(entry.rank))

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...], samples: _Samples
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=labels)
        for values, number in samples:
            family.add_metric(values, number)
        return family

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], samples: _Samples
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=labels)
        for values, number in samples:
            family.add_metric(values, number)
        return family
