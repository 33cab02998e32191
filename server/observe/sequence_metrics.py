"""How long sequences take and how they end, measured as their tokens reach the front end."""

import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from prometheus_client import Histogram

from server.observe.metric_factory import COUNT_BUCKETS, MetricFactory

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


class SequenceMetrics:
    """Metrics of sequences, whatever request they belong to."""

    def __init__(self, factory: MetricFactory) -> None:
        self.generation_tokens = factory.counter("generation_tokens", "Tokens generated.")
        self.success = factory.by_label(
            "request_success", "Sequences that ended, by reason.", "finished_reason"
        )
        for reason in ("stop", "length", "abort", "error"):
            self.success.child(reason)
        self.time_to_first_token = factory.histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _LATENCY_BUCKETS,
        )
        self.inter_token_latency = _BufferedHistogram(
            factory.histogram(
                "inter_token_latency_seconds",
                "Time between the tokens of a sequence as they reach the front end.",
                _TOKEN_LATENCY_BUCKETS,
            ),
            _TOKEN_LATENCY_BUCKETS,
        )
        self.time_per_output_token = factory.histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a sequence after its first.",
            _TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_request_latency = factory.histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to its last token.",
            _REQUEST_BUCKETS,
        )
        self.request_generation_tokens = factory.histogram(
            "request_generation_tokens", "Tokens generated per sequence.", COUNT_BUCKETS
        )


class SequenceTimer:
    """Measures one sequence, from the arrival of its request to its end."""

    __slots__ = ("_arrived", "_first", "_last", "_metrics", "_num_tokens")

    def __init__(self, metrics: SequenceMetrics, arrived: float) -> None:
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
        if self._num_tokens == 0:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token_latency.observe((now - self._last) / count, count)
        self._last = now
        self._num_tokens += count

    @property
    def first_token(self) -> float | None:
        """When the first token came, in monotonic seconds."""
        return self._first if self._num_tokens else None

    def finished(self, reason: str) -> None:
        """The sequence ended, for whatever reason."""
        metrics = self._metrics
        metrics.success.child(reason).inc()
        metrics.e2e_request_latency.observe(time.monotonic() - self._arrived)
        metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_tokens:
            metrics.generation_tokens.inc(self._num_tokens)
        if self._num_tokens > 1:
            per_token = (self._last - self._first) / (self._num_tokens - 1)
            metrics.time_per_output_token.observe(per_token)
            metrics.inter_token_latency.flush()
