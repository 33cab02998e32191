"""What is compared: the loads, on which model, what counts as the result, and the aim."""

from typing import NamedTuple


class BenchLoad(NamedTuple):
    """Streams of random prompts, sent by `vllm bench serve`."""

    prompt: int
    output: int
    streams: int
    requests: int


class WrkLoad(NamedTuple):
    """Completions over 64 kept connections, sent by wrk."""

    tokens: int
    stream: bool
    connections: int = 64
    prompt: int = 100
    seconds: int = 10


class Case(NamedTuple):
    """One row of the table."""

    name: str
    model: str
    """A shape of `benchmarks.make_model`."""
    load: BenchLoad | WrkLoad
    metric: str
    """Of `vllm bench serve`'s result file, or `tokens_per_second` / `requests_per_second`."""
    unit: str
    aim: str
    """What Swell is meant to reach, in words."""
    engines: tuple[int, ...] = (1,)
    """Data-parallel sizes that are tried; the best one of each side counts."""
    lower_is_better: bool = False


_OUTPUT, _TOTAL, _PER_TOKEN = "output_throughput", "total_token_throughput", "mean_tpot_ms"

CASES = (
    Case(
        "0.4b 16/128 x16", "0.4b", BenchLoad(16, 128, 16, 16), _OUTPUT, "output tok/s", ">= 1.05x"
    ),
    Case("0.4b 128/64 x16", "0.4b", BenchLoad(128, 64, 16, 16), _OUTPUT, "output tok/s", ">= 1.1x"),
    Case("0.4b 512/8 x8", "0.4b", BenchLoad(512, 8, 8, 8), _TOTAL, "total tok/s", ">= 1.05x"),
    Case(
        "0.4b 16/128 x1",
        "0.4b",
        BenchLoad(16, 128, 1, 1),
        _PER_TOKEN,
        "ms per token",
        ">= 1.1x",
        lower_is_better=True,
    ),
    Case(
        "2-layer 128/128 x64",
        "2-layer",
        BenchLoad(128, 128, 64, 192),
        _OUTPUT,
        "output tok/s",
        ">= 3.2x",
    ),
    Case(
        "2-layer wrk stream 100/128 x64",
        "2-layer",
        WrkLoad(128, stream=True),
        "tokens_per_second",
        "output tok/s",
        ">= 3.2x",
        engines=(1, 2),
    ),
    Case(
        "2-layer wrk 100/1 x64",
        "2-layer",
        WrkLoad(1, stream=False),
        "requests_per_second",
        "requests/s",
        ">= 3x",
        engines=(1, 2),
    ),
)

WARM_UP = {
    "0.4b": BenchLoad(64, 24, 16, 16),
    "2-layer": BenchLoad(128, 32, 64, 64),
}
"""Sent to every server before its cases, and not counted."""


class Visit(NamedTuple):
    """One start of one server, and the cases that it is loaded with."""

    side: str
    model: str
    engines: int
    cases: tuple[Case, ...]


def visits(cases: list[Case], sides: list[str], round_number: int) -> list[Visit]:
    """Return the servers that one round starts, in order.

    Sides alternate within each model and number of engines; every other round goes backwards, so
    that no side always follows the same one. Quantized sides are compared on one engine only.
    """
    order = sides if round_number % 2 == 0 else sides[::-1]
    planned = []
    for model in dict.fromkeys(case.model for case in cases):
        of_model = [case for case in cases if case.model == model]
        for engines in sorted({n for case in of_model for n in case.engines}):
            chosen = tuple(case for case in of_model if engines in case.engines)
            planned += [Visit(side, model, engines, chosen) for side in order]
    return planned
