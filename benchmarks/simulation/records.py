"""What happened to every request, and the numbers that sum it up."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.simulation.workload import NS, RequestSpec
from engine.shared.messages import RequestOutput


class Record:
    """One request: which engine served it, and when (ns)."""

    __slots__ = ("arrived", "engine", "finished", "first", "last", "spec")

    def __init__(self, spec: RequestSpec, engine: int, arrived: int) -> None:
        self.spec = spec
        self.engine = engine
        self.arrived = arrived
        self.first = -1
        self.last = -1
        self.finished = False


class Sample(NamedTuple):
    """The fleet at one moment, for the timeline."""

    at: int
    running: int
    waiting: int
    least_running: int
    most_running: int
    tokens: int
    """Generated so far."""


class Recorder:
    """Collects records while a simulation runs."""

    def __init__(self, num_engines: int, sample_every_ns: int = NS) -> None:
        self.records: list[Record] = []
        self.gaps: Counter[int] = Counter()
        """Time between two tokens of a request (ns), and how often."""
        self.tokens = 0
        self.finished = 0
        self.ended = 0
        """When the last token came (ns)."""
        self.steps = [0] * num_engines
        self.dummy_steps = [0] * num_engines
        self.samples: list[Sample] = []
        self._sample_every = sample_every_ns
        self._next_sample = 0

    def arrived(self, spec: RequestSpec, engine: int, now: int) -> int:
        """Note a request and return its id."""
        self.records.append(Record(spec, engine, now))
        return len(self.records) - 1

    def tokens_out(self, outputs: Sequence[RequestOutput], now: int) -> list[int]:
        """Note the tokens of a step that ends at `now`; return the ids of finished requests."""
        records, gaps = self.records, self.gaps
        done = []
        for output in outputs:
            record = records[output.id]
            if record.first < 0:
                record.first = now
            else:
                gaps[now - record.last] += 1
            record.last = now
            if output.finish_reason is not None:
                record.finished = True
                done.append(output.id)
        self.tokens += len(outputs)
        self.finished += len(done)
        self.ended = now
        return done

    def wants_sample(self, now: int) -> bool:
        """Whether it is time for the next point of the timeline."""
        return now >= self._next_sample

    def sample(self, now: int, running: Sequence[int], waiting: int) -> None:
        """Add a point to the timeline."""
        self._next_sample = now + self._sample_every
        self.samples.append(
            Sample(now, sum(running), waiting, min(running), max(running), self.tokens)
        )


class Latency(NamedTuple):
    """A latency in ms: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float


def latency(values_ns: Sequence[int]) -> Latency:
    """Return mean and percentiles (nearest rank) of latencies in ns; zeros if there are none."""
    return weighted_latency(Counter(values_ns))


def weighted_latency(counts: Counter[int]) -> Latency:
    """The same, of values that come with how often each occurred."""
    total = counts.total()
    if total == 0:
        return Latency(0.0, 0.0, 0.0, 0.0)
    ranks = [-(-total * percent // 100) for percent in (50, 90, 99)]
    found: list[float] = []
    seen = 0
    for value, count in sorted(counts.items()):
        seen += count
        while len(found) < len(ranks) and seen >= ranks[len(found)]:
            found.append(value / 1e6)
    mean = sum(value * count for value, count in counts.items()) / total / 1e6
    return Latency(mean, *found)


class Summary(NamedTuple):
    """The numbers of one run."""

    requests: int
    duration_s: float
    """From time 0 to the last token."""
    output_rate: float
    """Output tokens per second."""
    ttft: Latency
    tpot: Latency
    """Per request: time from first to last token, divided by the tokens after the first."""
    itl: Latency
    e2e: Latency
    imbalance: float
    """Output tokens of the busiest engine over the mean of all engines."""
    running_spread: float
    """Mean over time of most minus least running requests per engine."""
    dummy_share: float
    """Steps without any work, of all engines' steps."""
    steps: int


def summarize(recorder: Recorder) -> Summary:
    """Return the numbers of a finished run."""
    done = [record for record in recorder.records if record.finished]
    per_engine = [0] * len(recorder.steps)
    for record in done:
        per_engine[record.engine] += record.spec.output_tokens
    duration = recorder.ended / NS
    steps = sum(recorder.steps)
    mean_tokens = sum(per_engine) / len(per_engine)
    samples = recorder.samples
    return Summary(
        requests=len(done),
        duration_s=duration,
        output_rate=recorder.tokens / duration if duration else 0.0,
        ttft=latency([record.first - record.arrived for record in done]),
        tpot=latency(
            [
                (record.last - record.first) // (record.spec.output_tokens - 1)
                for record in done
                if record.spec.output_tokens > 1
            ]
        ),
        itl=weighted_latency(recorder.gaps),
        e2e=latency([record.last - record.arrived for record in done]),
        imbalance=max(per_engine) / mean_tokens if mean_tokens else 1.0,
        running_spread=(
            sum(s.most_running - s.least_running for s in samples) / len(samples)
            if samples
            else 0.0
        ),
        dummy_share=sum(recorder.dummy_steps) / steps if steps else 0.0,
        steps=steps,
    )
