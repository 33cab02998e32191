"""Computes the statistics of a report from measured requests; no I/O, no clock."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

SLO_NAMES = ("ttft", "tpot", "e2el")


class Record(msgspec.Struct):
    """One request as seen by the client; times in seconds."""

    index: int = 0
    scheduled: float = 0.0
    """Due time after the start of the measurement."""
    started: float = 0.0
    """Time of sending after the start of the measurement."""
    total: float = 0.0
    """From sending to the last byte."""
    first_token: float | None = None
    """From sending to the first output; None if not streamed or without output."""
    gaps: bytes = b""
    """Times between consecutive deltas, as packed 32-bit floats."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As counted by the server."""
    deltas: int = 0
    """Stream chunks with output; one can have several tokens."""
    status: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """Kind of failure, e.g. `http_503`, `timeout`; None for success."""
    detail: str = ""
    """Error message of the server or the system."""

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.total - self.first_token) / (self.output_tokens - 1)

    def inter_token_latencies(self) -> "array[float]":
        """Times between consecutive deltas."""
        return array("f", self.gaps)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of values in ascending order, interpolated linearly between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("no values")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Distribution(msgspec.Struct):
    """Statistics of a latency over all requests, in ms."""

    count: int
    mean: float
    std: float
    max: float
    percentiles: dict[float, float]


def distribution(seconds: Iterable[float], percents: Sequence[float]) -> Distribution | None:
    """Return the statistics of some times; None if there are none."""
    ordered = sorted(1000 * each for each in seconds)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((each - mean) ** 2 for each in ordered) / len(ordered)
    return Distribution(
        count=len(ordered),
        mean=mean,
        std=math.sqrt(variance),
        max=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in percents},
    )


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Return limits in seconds from strings like `ttft:500` (ms).

    Raises:
        ValueError: a string is not NAME:MILLISECONDS with a known name.
    """
    parsed = {}
    for word in limits:
        name, _, value = word.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in SLO_NAMES or not milliseconds > 0:
            raise ValueError(f"{word!r} is not one of {', '.join(SLO_NAMES)} with ':MILLISECONDS'")
        parsed[name] = milliseconds / 1000
    return parsed


def is_good(record: Record, limits: dict[str, float]) -> bool:
    """Return whether a request succeeded within all limits; missing times are within them."""
    times = {
        "ttft": record.first_token,
        "tpot": record.time_per_output_token,
        "e2el": record.total,
    }
    return record.error is None and all(
        (times[name] or 0.0) <= limit for name, limit in limits.items()
    )


class Summary(msgspec.Struct):
    """All results of a run; throughputs are per second of `duration`."""

    duration: float
    """Seconds from the start to the end of the last request."""
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    """Requests per second within all limits; None if there are no limits."""
    max_concurrent_requests: int
    errors: dict[str, int]
    latencies: dict[str, Distribution]
    """By name: ttft, tpot, itl, e2el; only those that were measured."""
    schedule_delay: Distribution | None
    """How late requests were sent; None if all were due at once."""


def summarize(
    records: Sequence[Record], percents: Sequence[float], limits: dict[str, float]
) -> Summary:
    """Summarize a run. Latencies and tokens are those of successful requests."""
    good = [record for record in records if record.error is None]
    duration = max((record.started + record.total for record in records), default=0.0)
    per_second = 1 / duration if duration > 0 else 0.0
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    samples: dict[str, Iterable[float]] = {
        "ttft": [each.first_token for each in good if each.first_token is not None],
        "tpot": [time for each in good if (time := each.time_per_output_token) is not None],
        "itl": (gap for each in good for gap in each.inter_token_latencies()),
        "e2el": [record.total for record in good],
    }
    due = [record.scheduled for record in records]
    delays = [max(0.0, record.started - record.scheduled) for record in records]
    latencies = {name: distribution(values, percents) for name, values in samples.items()}
    return Summary(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=prompt_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) * per_second,
        output_throughput=output_tokens * per_second,
        total_token_throughput=(prompt_tokens + output_tokens) * per_second,
        request_goodput=(
            sum(is_good(record, limits) for record in good) * per_second if limits else None
        ),
        max_concurrent_requests=max_at_once(records),
        errors=dict(Counter(each.error for each in records if each.error is not None)),
        latencies={name: found for name, found in latencies.items() if found is not None},
        schedule_delay=distribution(delays, percents) if any(due) else None,
    )


def max_at_once(records: Iterable[Record]) -> int:
    """Return the maximum number of requests in flight at the same time."""
    changes = []
    for record in records:
        changes += [(record.started, 1), (record.started + record.total, -1)]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


class ClientCost(msgspec.Struct):
    """Resources that one sending process used during the measurement."""

    cpu_seconds: float
    wall_seconds: float
    deltas: int
    loop_lag_p99: float
    """99th percentile of event loop timer lateness, in seconds."""
    loop_lag_max: float

    @property
    def cpu_share(self) -> float:
        """CPU usage as a fraction of one core."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


BUSY_SHARE = 0.8
LATE_SECONDS = 0.010


def client_warnings(
    costs: Sequence[ClientCost], schedule_delay_p99: float, *, open_loop: bool
) -> list[str]:
    """Return reasons why the client, not the server, may have limited the results, if any.

    Args:
        costs: one per sending process.
        schedule_delay_p99: lateness of requests in ms.
        open_loop: whether requests had due times and no concurrency limit.
    """
    found = []
    busiest = max((cost.cpu_share for cost in costs), default=0.0)
    if busiest > BUSY_SHARE:
        found.append(
            f"a sending process used {100 * busiest:.0f} % of a core: the client is the "
            "bottleneck, raise --processes"
        )
    lag = max((cost.loop_lag_p99 for cost in costs), default=0.0)
    if lag > LATE_SECONDS:
        cause = "it is overloaded" if busiest > BUSY_SHARE else "the machine has no core to spare"
        found.append(
            f"the client's event loop ran up to {1000 * lag:.0f} ms late (p99): latencies are too "
            f"high by as much, because {cause}"
        )
    if open_loop and schedule_delay_p99 > 1000 * LATE_SECONDS:
        found.append(
            f"requests were sent {schedule_delay_p99:.0f} ms late (p99): the rate was not kept"
        )
    return found
