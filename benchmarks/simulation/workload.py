"""What clients ask for: lengths, and when requests come."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NS = 1_000_000_000
"""Virtual time is in integer nanoseconds, so that sums do not depend on their order."""

DEFAULT_TURNAROUND_NS = 1_000_000

DEFAULT_MAX_TOKENS = 16_384
"""Longest draw of a length that names no `max`."""


class RequestSpec(NamedTuple):
    """One request: prompt tokens, and tokens to generate."""

    prompt_tokens: int
    output_tokens: int


class InvalidSpec(ValueError):
    """A workload is described wrongly; the message says what was expected."""


@dataclass(frozen=True)
class Workload:
    """Requests, in the order in which they are sent.

    Open loop: request i arrives at `arrivals_ns[i]`. Closed loop: `concurrency` clients start at
    time 0 and each sends its next request `turnaround_ns` after its last one is complete. An
    engine starts its next step before a client can answer, so a turnaround of 0 would let in
    requests earlier than is possible.
    """

    requests: list[RequestSpec]
    arrivals_ns: list[int] | None = None
    concurrency: int = 0
    turnaround_ns: int = DEFAULT_TURNAROUND_NS


def first_arrivals(workload: Workload) -> list[int]:
    """Return the arrival times (ns) that are known before anything is served."""
    if workload.arrivals_ns is not None:
        return workload.arrivals_ns
    return [0] * min(workload.concurrency, len(workload.requests))


# -- lengths -------------------------------------------------------------------------------------

_SHAPES: dict[str, tuple[int, Callable[[random.Random, list[float]], float]]] = {
    "constant": (1, lambda _, p: p[0]),
    "uniform": (2, lambda rng, p: rng.uniform(p[0], p[1])),
    "normal": (2, lambda rng, p: rng.gauss(p[0], p[1])),
    "lognormal": (2, lambda rng, p: rng.lognormvariate(math.log(p[0]), p[1])),
    "exponential": (1, lambda rng, p: rng.expovariate(1 / p[0])),
}
_HELP = (
    "expected constant:N, uniform:LOW,HIGH, normal:MEAN,STDDEV, lognormal:MEDIAN,SIGMA or "
    "exponential:MEAN, with ,min=N and ,max=N where wanted"
)


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, drawn as whole numbers from `least` to `most`."""

    shape: str
    parameters: list[float]
    least: int = 1
    most: int = DEFAULT_MAX_TOKENS

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Return the distribution that a text like `lognormal:2000,0.8,max=12000` names.

        Raises:
            InvalidSpec: it names none.
        """
        shape, _, rest = text.partition(":")
        count, _ = _SHAPES.get(shape, (-1, None))
        words = rest.split(",") if rest else []
        limits = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            parameters = [float(word) for word in words if "=" not in word]
            least, most = int(limits.pop("min", 1)), int(limits.pop("max", DEFAULT_MAX_TOKENS))
        except ValueError as error:
            raise InvalidSpec(f"{text}: {_HELP}") from error
        positive = shape == "uniform" or (bool(parameters) and parameters[0] > 0)
        if len(parameters) != count or limits or not positive or not 1 <= least <= most:
            raise InvalidSpec(f"{text}: {_HELP}")
        return cls(shape, parameters, least, most)

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        value = _SHAPES[self.shape][1](rng, self.parameters)
        return min(self.most, max(self.least, round(value)))


def draw_requests(
    count: int, prompt: Lengths, output: Lengths, rng: random.Random
) -> list[RequestSpec]:
    """Return `count` requests with independent lengths."""
    return [RequestSpec(prompt.draw(rng), output.draw(rng)) for _ in range(count)]


# -- arrivals ------------------------------------------------------------------------------------


def closed_loop(requests: list[RequestSpec], concurrency: int) -> Workload:
    """`concurrency` clients, each of which always has one request under way."""
    return Workload(requests, None, concurrency)


def poisson(requests: list[RequestSpec], rate: float, rng: random.Random) -> Workload:
    """Independent clients: `rate` requests per second on average."""
    now = 0.0
    arrivals = []
    for _ in requests:
        now += rng.expovariate(rate)
        arrivals.append(round(now * NS))
    return Workload(requests, arrivals)


def burst(
    requests: list[RequestSpec], rate: float, size: int, at: float, rng: random.Random
) -> Workload:
    """A Poisson stream with `size` more requests all at once, `at` seconds from the start."""
    stream = poisson(requests[size:], rate, rng).arrivals_ns or []
    return Workload(requests, sorted([round(at * NS)] * size + stream))


def read_trace(path: Path) -> Workload:
    """Read JSON lines with `arrival_s`, `prompt_tokens` and `output_tokens`.

    Raises:
        InvalidSpec: a line is something else.
    """
    entries: list[tuple[int, RequestSpec]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at = round(float(entry["arrival_s"]) * NS)
            spec = RequestSpec(int(entry["prompt_tokens"]), int(entry["output_tokens"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidSpec(f"{path}, line {number}: {type(error).__name__} {error}") from error
        if at < 0 or min(spec) < 1:
            raise InvalidSpec(f"{path}, line {number}: times from 0 and lengths from 1")
        entries.append((at, spec))
    entries.sort(key=lambda entry: entry[0])
    return Workload([spec for _, spec in entries], [at for at, _ in entries])
