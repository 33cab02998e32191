"""What is measured of sequences, as series of the engine that ran them.

Names, labels and meanings are vLLM's; bounds are vLLM's and some smaller ones. docs/metrics.md says
where a meaning needs more words.
"""

from bisect import bisect_left
from typing import Any

from prometheus_client import Counter, Histogram

from engine.shared.messages import RequestTiming
from server.observe.metric_factory import COUNT_BUCKETS, Labelled, MetricFactory

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
        "Time that a sequence waited in its engine to be scheduled first.", _PHASE_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Time in the engine from being scheduled first to the first token.", _PHASE_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "Time in the engine from the first token to the last.", _PHASE_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Time in the engine from being scheduled first to the last token.", _PHASE_BUCKETS,
    ),
    "request_prompt_tokens": ("Prompt tokens per sequence.", COUNT_BUCKETS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens per sequence that the prefix cache did not have.", COUNT_BUCKETS,
    ),
    "request_num_preemptions": ("Preemptions per sequence.", _PREEMPTION_BUCKETS),
    "request_generation_tokens": ("Tokens generated per sequence.", COUNT_BUCKETS),
    "request_max_num_generation_tokens": (
        "Tokens of the longest sequence of a prompt.", COUNT_BUCKETS,
    ),
    "request_params_max_tokens": (
        "The parameter max_tokens of a sequence; where it was not given, what is left of the "
        "context.",
        COUNT_BUCKETS,
    ),
    "request_params_n": ("The parameter n of a prompt.", _N_BUCKETS),
}  # fmt: skip


class Distribution:
    """A histogram whose observations are counted here and handed over in bulk.

    One observation of a memory-mapped histogram costs microseconds, and a sequence makes a dozen.
    """

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram: Any = histogram  # its parts have no public names
        self._bounds = bounds
        self._counts: dict[int, int] = {}
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or several that are equal."""
        index = bisect_left(self._bounds, value)
        self._counts[index] = self._counts.get(index, 0) + count
        self._sum += value * count

    def flush(self) -> None:
        """Make everything counted visible to scrapes of any process."""
        if not self._counts:
            return
        for index, count in self._counts.items():
            self._histogram._buckets[index].inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts.clear()
        self._sum = 0.0


class Count:
    """A counter whose increments are summed up here and handed over in bulk."""

    __slots__ = ("_counter", "pending")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.pending = 0

    def flush(self) -> None:
        """Make everything counted visible to scrapes of any process."""
        if self.pending:
            self._counter.inc(self.pending)
            self.pending = 0


class EngineSeries:
    """The Prometheus series of one engine."""

    def __init__(self, families: "SequenceFamilies", rank: int) -> None:
        self._all: list[Distribution | Count] = []

        def histogram(name: str) -> Distribution:
            made = Distribution(families.histograms[name].child(rank), _HISTOGRAMS[name][1])
            self._all.append(made)
            return made

        def count(family: Labelled[Counter], *labels: str) -> Count:
            made = Count(family.child(rank, *labels))
            self._all.append(made)
            return made

        self._prompt_tokens = count(families.prompt_tokens)
        self._cached = count(families.cached)
        self._computed = count(families.by_source, "local_compute")
        self._found = count(families.by_source, "local_cache_hit")
        self._ended = {
            reason: count(families.success, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._tokens = count(families.generation_tokens)
        self._token_latency = histogram("inter_token_latency_seconds")
        self._time_to_first_token = histogram("time_to_first_token_seconds")
        self._time_per_output_token = histogram("request_time_per_output_token_seconds")
        self._e2e_latency = histogram("e2e_request_latency_seconds")
        self._queue_time = histogram("request_queue_time_seconds")
        self._prefill_time = histogram("request_prefill_time_seconds")
        self._decode_time = histogram("request_decode_time_seconds")
        self._inference_time = histogram("request_inference_time_seconds")
        self._request_prompt_tokens = histogram("request_prompt_tokens")
        self._kv_computed_tokens = histogram("request_prefill_kv_computed_tokens")
        self._num_preemptions = histogram("request_num_preemptions")
        self._request_generation_tokens = histogram("request_generation_tokens")
        self._max_num_generation_tokens = histogram("request_max_num_generation_tokens")
        self._params_max_tokens = histogram("request_params_max_tokens")
        self._params_n = histogram("request_params_n")

    def flush(self) -> None:
        """Make everything counted visible to scrapes of any process."""
        for each in self._all:
            each.flush()

    def first_tokens(self, count: int, waited: float, prompt_tokens: int, cached: int) -> None:
        """Count a sequence's first tokens, which came at once, `waited` seconds after its request.

        The prefix cache had `cached` of its prompt's tokens.
        """
        self._time_to_first_token.observe(waited)
        self._tokens.pending += count
        self._prompt(prompt_tokens, cached)

    def prompt_computed(self, prompt_tokens: int, cached: int) -> None:
        """Count a prompt of which no tokens are drawn; the prefix cache had `cached` of it."""
        self._prompt(prompt_tokens, cached)

    def more_tokens(self, count: int, seconds: float) -> None:
        """Count `count` tokens that came `seconds` after those before."""
        self._token_latency.observe(seconds / count, count)
        self._tokens.pending += count

    def ended(
        self,
        reason: str,
        *,
        waited: float,
        prompt_tokens: int,
        cached: int,
        num_tokens: int,
        max_tokens: int,
        decoding: float,
        timing: RequestTiming | None,
    ) -> None:
        """Count a sequence that has ended; times are in seconds.

        Args:
            reason: why it ended.
            waited: since its request arrived.
            prompt_tokens: of its prompt.
            cached: how many of these the prefix cache had.
            num_tokens: generated.
            max_tokens: that could have been generated.
            decoding: from its first token to its last.
            timing: its times in engines, if they are known.
        """
        self._ended[reason].pending += 1
        self._e2e_latency.observe(waited)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(num_tokens)
        self._params_max_tokens.observe(max_tokens)
        if num_tokens > 1:
            self._time_per_output_token.observe(decoding / (num_tokens - 1))
        if timing is None:
            return
        if num_tokens == 0:  # the token that was drawn was not asked for
            self._prompt(prompt_tokens, cached)
        self._kv_computed_tokens.observe(max(0, prompt_tokens - cached))
        self._num_preemptions.observe(timing.preemptions)
        self._queue_time.observe(timing.queue)
        self._prefill_time.observe(timing.prefill)
        self._decode_time.observe(timing.decode)
        self._inference_time.observe(timing.prefill + timing.decode)

    def prompt_ended(self, n: int, longest: int) -> None:
        """Count a prompt whose `n` answers have ended, the longest with `longest` tokens."""
        self._params_n.observe(n)
        self._max_num_generation_tokens.observe(longest)

    def _prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, some of whose tokens the prefix cache had."""
        cached = min(cached, tokens)  # a counter would not take what an engine may have said
        self._prompt_tokens.pending += tokens
        self._computed.pending += tokens - cached
        self._cached.pending += cached
        self._found.pending += cached


class SequenceFamilies:
    """The metrics whose children make up the series of an engine."""

    def __init__(self, factory: MetricFactory) -> None:
        self.prompt_tokens = factory.counter(
            "prompt_tokens", "Prompt tokens of sequences that got their first token.", "engine"
        )
        self.cached = factory.counter(
            "prompt_tokens_cached", "Those of them that the prefix cache had.", "engine"
        )
        self.by_source = factory.counter(
            "prompt_tokens_by_source", "Prompt tokens computed, and found.", "engine", "source"
        )
        self.generation_tokens = factory.counter("generation_tokens", "Tokens generated.", "engine")
        self.success = factory.counter(
            "request_success", "Sequences that ended, by reason.", "engine", "finished_reason"
        )
        self.histograms = {
            name: factory.histogram(name, text, buckets, "engine")
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
