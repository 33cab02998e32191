"""How long sequences take and how they end: as their tokens reach the front end, and in engines."""

import time

from engine.shared.messages import RequestTiming
from server.observe.engine_series import EngineSeries, SequenceFamilies
from server.observe.metric_factory import MetricFactory
from server.router.engine_times import EngineTimes, EngineVisit

_FLUSH_AFTER = 0.25
"""Seconds for which what is counted may wait to be handed over in bulk."""


class SequenceMetrics:
    """Metrics of sequences by engine, whatever request they belong to."""

    def __init__(self, factory: MetricFactory) -> None:
        self._families = SequenceFamilies(factory)
        self._series: dict[int, EngineSeries] = {}
        self._unfinished = 0
        self._flushed_at = 0.0

    def of_engine(self, rank: int) -> EngineSeries:
        """Return the series of an engine; the first time they are made, all at zero."""
        known = self._series.get(rank)
        if known is None:
            known = self._series[rank] = EngineSeries(self._families, rank)
        return known

    def began(self) -> None:
        """A sequence began, and will end."""
        self._unfinished += 1

    def ended(self, now: float) -> None:
        """A sequence ended; when the last one has, everything is made visible."""
        self._unfinished -= 1
        if not self._unfinished:
            self.flush()
        else:
            self.tick(now)

    def tick(self, now: float) -> None:
        """Make everything counted visible if that was some time ago."""
        if now - self._flushed_at > _FLUSH_AFTER:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Make everything counted visible to scrapes of any process."""
        for series in self._series.values():
            series.flush()


class PromptParams:
    """What the sequences of one prompt have in common, and how long the longest of them got."""

    def __init__(self, prompt_tokens: int, max_tokens: int, n: int, sequences: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.n = n
        self.longest = 0
        self._unfinished = sequences

    def ended(self, num_tokens: int) -> bool:
        """Count a sequence that ended with `num_tokens` tokens; return whether it was the last."""
        self.longest = max(self.longest, num_tokens)
        self._unfinished -= 1
        return self._unfinished == 0


class SequenceTimer:
    """Measures one sequence, from the arrival of its request to its end.

    What happens counts for the engine that the sequence is in when it happens.
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
        """How long it took in engines, once it has ended in one."""
        metrics.began()

    def _current(self) -> EngineSeries:
        if self._times.engine != self._engine:
            self._engine = self._times.engine
            self._series = self._metrics.of_engine(self._engine)
        return self._series

    def tokens(self, count: int, cached: int = 0, reason: str | None = None) -> None:
        """The engine sent `count` more tokens; it had found `cached` of the prompt's.

        With `reason` the sequence has ended.
        """
        self._cached = cached
        if count:
            series, now = self._current(), time.monotonic()
            if self._num_tokens == 0:
                self._first = now
                waited, prompt_tokens = now - self._arrived, self._params.prompt_tokens
                series.first_tokens(count, waited, prompt_tokens, cached)
            else:
                series.more_tokens(count, now - self._last)
            self._last = now
            self._num_tokens += count
            self._metrics.tick(now)
        if reason is not None:
            self.finished(reason)

    def pooled(self, cached: int) -> None:
        """The engine sent the sequence's vector; it had found `cached` of its tokens."""
        self._cached = cached
        self._current().prompt_computed(self._params.prompt_tokens, cached)
        self.finished("stop")

    @property
    def first_token(self) -> float | None:
        """When the first token came, in monotonic seconds."""
        return self._first if self._num_tokens else None

    @property
    def visits(self) -> list[EngineVisit]:
        """The engines that it has been in, once it has ended."""
        return self._times.visits

    def finished(self, reason: str) -> None:
        """The sequence ended, for whatever reason."""
        series, params, now = self._current(), self._params, time.monotonic()
        self.timing = self._times.ended(now)
        series.ended(
            reason,
            waited=now - self._arrived,
            prompt_tokens=params.prompt_tokens,
            cached=self._cached,
            num_tokens=self._num_tokens,
            max_tokens=params.max_tokens,
            decoding=self._last - self._first,
            timing=self.timing,
        )
        if params.ended(self._num_tokens):
            series.prompt_ended(params.n, params.longest)
        self._metrics.ended(now)
