"""Latency and completion metrics of sequences, measured in the front end and in engines.

The series belong to the engine that ran a sequence. Names, labels and meanings are vLLM's; buckets
are vLLM's and some smaller ones. docs/metrics.md explains the meanings in detail.
"""

import time
from bisect import bisect_left
from collections import Counter as Tally
from typing import Any

from prometheus_client import Counter, Histogram

from engine.shared.messages import RequestTiming
from server.observe.metric_factory import COUNT_BUCKETS, MetricFactory
from server.router.request import EnginePeriod, EngineTimes

_FLUSH_AFTER = 0.25
"""Maximum seconds between flushes of buffered counts."""

_LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PHASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, *_REQUEST_BUCKETS[1:])
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token.", _LATENCY_BUCKETS,
    ),
    "inter_token_latency_seconds": (
        "Time between the tokens of a sequence as they reach the front end.",
        _TOKEN_LATENCY_BUCKETS,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time per token of a sequence after its first.", _TOKEN_LATENCY_BUCKETS,
    ),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its last token.", _REQUEST_BUCKETS,
    ),
    "request_queue_time_seconds": (
        "Time from a sequence's arrival at its engine until it is first scheduled.", _PHASE_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Time in the engine from first being scheduled to the first token.", _PHASE_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "Time in the engine from the first token to the last.", _PHASE_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Time in the engine from first being scheduled to the last token.", _PHASE_BUCKETS,
    ),
    "request_prompt_tokens": ("Prompt tokens per sequence.", COUNT_BUCKETS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens per sequence that were not in the prefix cache.", COUNT_BUCKETS,
    ),
    "request_num_preemptions": ("Preemptions per sequence.", _PREEMPTION_BUCKETS),
    "request_generation_tokens": ("Tokens generated per sequence.", COUNT_BUCKETS),
    "request_max_num_generation_tokens": (
        "Tokens of the longest sequence of a prompt.", COUNT_BUCKETS,
    ),
    "request_params_max_tokens": (
        "The parameter max_tokens of a sequence; if not given, the rest of the context.",
        COUNT_BUCKETS,
    ),
    "request_params_n": ("The parameter n of a prompt.", _N_BUCKETS),
}  # fmt: skip

_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of sequences that got their first token.", "", ("",)),
    "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", "", ("",)),
    "prompt_tokens_by_source": (
        "Prompt tokens by source.", "source", ("local_compute", "local_cache_hit"),
    ),
    "generation_tokens": ("Tokens generated.", "", ("",)),
    "request_success": (
        "Sequences that ended, by reason.", "finished_reason",
        ("stop", "length", "abort", "error"),
    ),
}  # fmt: skip
"""Help text of each counter, its label besides the engine, and that label's values."""

OTHERS = "others"
"""Value of the label `engine` shared by all engines without separate series."""


class Distribution:
    """A histogram that buffers its observations and flushes them in bulk.

    An observation of a memory-mapped histogram takes microseconds, and a sequence makes a dozen.
    """

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram: Any = histogram  # accesses private fields
        self._bounds = bounds
        self._counts: dict[int, int] = {}
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record a value `count` times."""
        index = bisect_left(self._bounds, value)
        self._counts[index] = self._counts.get(index, 0) + count
        self._sum += value * count

    def flush(self) -> None:
        """Make all buffered observations visible to scrapes of any process."""
        if not self._counts:
            return
        for index, count in self._counts.items():
            self._histogram._buckets[index].inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts.clear()
        self._sum = 0.0


class EngineSeries:
    """The series of one engine; all start at zero."""

    def __init__(self, metrics: "SequenceMetrics", rank: int | str) -> None:
        self.histograms = {
            name: Distribution(family.child(rank), _HISTOGRAMS[name][1])
            for name, family in metrics.histograms.items()
        }
        self.pending: Tally[tuple[str, str]] = Tally()
        """Counts not flushed yet, by name and label."""
        self._counters: dict[tuple[str, str], Counter] = {
            (name, value): family.child(rank, *filter(None, (value,)))
            for name, family in metrics.counters.items()
            for value in _COUNTERS[name][2]
        }

    def flush(self) -> None:
        """Make all buffered observations visible to scrapes of any process."""
        for distribution in self.histograms.values():
            distribution.flush()
        for key, count in self.pending.items():
            self._counters[key].inc(count)
        self.pending.clear()

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt's tokens; `cached` of them were in the prefix cache."""
        cached = min(cached, tokens)  # counters reject negative increments
        pending = self.pending
        pending["prompt_tokens", ""] += tokens
        pending["prompt_tokens_cached", ""] += cached
        pending["prompt_tokens_by_source", "local_compute"] += tokens - cached
        pending["prompt_tokens_by_source", "local_cache_hit"] += cached


class SequenceMetrics:
    """Metrics of all sequences, by engine.

    An engine has some 300 series per process and node, so the ranks from `limit` on share one set.
    """

    def __init__(self, factory: MetricFactory, limit: int) -> None:
        self._limit = limit
        self.counters = {
            name: factory.counter(name, text, "engine", *filter(None, (label,)))
            for name, (text, label, _) in _COUNTERS.items()
        }
        self.histograms = {
            name: factory.histogram(name, text, buckets, "engine")
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._series: dict[int, EngineSeries] = {}
        self._unfinished = 0
        self._flushed_at = 0.0

    def of_engine(self, rank: int) -> EngineSeries:
        """Return the series of an engine, creating them on first use."""
        slot = min(rank, self._limit)
        known = self._series.get(slot)
        if known is None:
            label = rank if rank < self._limit else OTHERS
            known = self._series[slot] = EngineSeries(self, label)
        return known

    def started(self) -> None:
        """Count a sequence as unfinished."""
        self._unfinished += 1

    def ended(self, now: float) -> None:
        """Record that a sequence ended; flush if it was the last unfinished one."""
        self._unfinished -= 1
        if not self._unfinished:
            self.flush()
        else:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Flush if the last flush was long enough ago."""
        if now - self._flushed_at > _FLUSH_AFTER:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Make all buffered observations visible to scrapes of any process."""
        for series in self._series.values():
            series.flush()


class PromptParams:
    """Common parameters of one prompt's sequences, and the length of the longest one."""

    def __init__(self, prompt_tokens: int, max_tokens: int, n: int, sequences: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.n = n
        self.longest = 0
        self._unfinished = sequences

    def ended(self, num_tokens: int) -> bool:
        """Record the length of an ended sequence; return whether it was the last."""
        self.longest = max(self.longest, num_tokens)
        self._unfinished -= 1
        return self._unfinished == 0


class SequenceTimer:
    """Measures one sequence, from the arrival of its request to its end.

    Events count for the engine that has the sequence at that time.
    """

    __slots__ = (
        "_arrived", "_cached", "_engine", "_first", "_last", "_metrics", "_num_tokens", "_params",
        "_series", "_times", "timing",
    )  # fmt: skip

    def __init__(
        self, metrics: SequenceMetrics, arrived: float, params: PromptParams, times: EngineTimes
    ) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._params = params
        self._times = times
        self._engine = times.engine
        self._series = metrics.of_engine(self._engine)
        self._first = 0.0
        self._last = 0.0
        self._num_tokens = 0
        self._cached = 0
        self.timing: RequestTiming | None = None
        """Durations in the engine in which it ended; None until then."""
        metrics.started()

    def _current(self) -> EngineSeries:
        if self._times.engine != self._engine:
            self._engine = self._times.engine
            self._series = self._metrics.of_engine(self._engine)
        return self._series

    def tokens(self, count: int, cached: int = 0, reason: str | None = None) -> None:
        """Record `count` more tokens, and the number of cached prompt tokens.

        With `reason` the sequence has ended.
        """
        self._cached = cached
        if count:
            series, now = self._current(), time.monotonic()
            if self._num_tokens == 0:
                self._first = now
                series.histograms["time_to_first_token_seconds"].observe(now - self._arrived)
                series.prompt(self._params.prompt_tokens, cached)
            else:
                each = (now - self._last) / count
                series.histograms["inter_token_latency_seconds"].observe(each, count)
            series.pending["generation_tokens", ""] += count
            self._last = now
            self._num_tokens += count
            self._metrics.tick(now)
        if reason is not None:
            self.finished(reason)

    def pooled(self, cached: int) -> None:
        """Record the arrival of the sequence's vector, and its number of cached tokens."""
        self._cached = cached
        self._current().prompt(self._params.prompt_tokens, cached)
        self.finished("stop")

    @property
    def first_token(self) -> float | None:
        """Arrival of the first token, in monotonic seconds."""
        return self._first if self._num_tokens else None

    @property
    def engine_periods(self) -> list[EnginePeriod]:
        """The engines that had the sequence, once it has ended."""
        return self._times.engine_periods

    def finished(self, reason: str) -> None:
        """Record the end of the sequence."""
        series, params, now = self._current(), self._params, time.monotonic()
        histograms, count = series.histograms, self._num_tokens
        timing = self.timing = self._times.ended(now)
        series.pending["request_success", reason] += 1
        histograms["e2e_request_latency_seconds"].observe(now - self._arrived)
        histograms["request_prompt_tokens"].observe(params.prompt_tokens)
        histograms["request_generation_tokens"].observe(count)
        histograms["request_params_max_tokens"].observe(params.max_tokens)
        if count > 1:
            decoding = (self._last - self._first) / (count - 1)
            histograms["request_time_per_output_token_seconds"].observe(decoding)
        if timing is not None:
            if count == 0:  # a token was sampled but not requested
                series.prompt(params.prompt_tokens, self._cached)
            computed = max(0, params.prompt_tokens - self._cached)
            histograms["request_prefill_kv_computed_tokens"].observe(computed)
            histograms["request_num_preemptions"].observe(timing.preemptions)
            histograms["request_queue_time_seconds"].observe(timing.queue)
            histograms["request_prefill_time_seconds"].observe(timing.prefill)
            histograms["request_decode_time_seconds"].observe(timing.decode)
            histograms["request_inference_time_seconds"].observe(timing.prefill + timing.decode)
        if params.ended(count):
            histograms["request_params_n"].observe(params.n)
            histograms["request_max_num_generation_tokens"].observe(params.longest)
        self._metrics.ended(now)
