"""From the runs of all rounds to tables."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.versus.cases import CASES, Case


class Run(msgspec.Struct, frozen=True):
    """One case on one server in one round."""

    case: str
    side: str
    engines: int
    round: int
    value: float
    """In the unit of the case."""
    details: dict[str, float | str]
    """Everything that the load generator said."""


class Start(msgspec.Struct, frozen=True):
    """One start of one server."""

    side: str
    model: str
    engines: int
    round: int
    seconds: float
    resident_mb: float
    """After its load; all processes, what they share counted once."""


class Results(msgspec.Struct):
    """Everything that was measured."""

    machine: str
    versions: dict[str, str]
    began: str = ""
    """Date and time of the first round's start."""
    commit: str = ""
    """Of Swell; marked as dirty where files differed from it."""
    runs: list[Run] = []
    starts: list[Start] = []
    failures: list[str] = []


class Median(msgspec.Struct, frozen=True):
    """The best number of engines of a side in a case: median, extremes, and how many engines."""

    value: float
    lowest: float
    highest: float
    rounds: int
    engines: int


def best(results: Results, case: Case, side: str) -> Median | None:
    """Return what a side reached with its best number of engines; None without runs."""
    found = []
    for engines in case.engines:
        values = [
            run.value
            for run in results.runs
            if (run.case, run.side, run.engines) == (case.name, side, engines)
        ]
        if values:
            median = statistics.median(values)
            found.append(Median(median, min(values), max(values), len(values), engines))
    choose = min if case.lower_is_better else max
    return choose(found, key=lambda each: each.value, default=None)


def ratio(case: Case, ours: Median, theirs: Median) -> float:
    """Return how many times better ours is."""
    if case.lower_is_better:
        return theirs.value / ours.value
    return ours.value / theirs.value


def comparison(
    results: Results, sides: Sequence[str], peer: str, *, spread: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of the ratio table, cases without runs left out.

    With `spread` the lowest and the highest value stand beside each median.
    """
    ours = [side for side in sides if side != peer]
    heading = ["load", "unit", peer]
    for side in ours:
        heading += [side, "ratio"]
    heading.append("aim")
    rows = []
    for case in CASES:
        theirs = best(results, case, peer)
        of_ours = [best(results, case, side) for side in ours]
        if theirs is None and not any(of_ours):
            continue
        row = [case.name, case.unit, _cell(case, theirs, spread)]
        for each in of_ours:
            row.append(_cell(case, each, spread))
            row.append(f"{ratio(case, each, theirs):.2f}x" if each and theirs else "")
        rows.append([*row, case.aim])
    return heading, rows


def starts(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of the table of start times and memory."""
    heading = ["model", "server", "engines", "ready after, s", "resident MB after the load"]
    groups = {(each.model, each.side, each.engines): None for each in results.starts}
    rows = []
    for model, side, engines in groups:
        of_group = [
            s for s in results.starts if (s.model, s.side, s.engines) == (model, side, engines)
        ]
        seconds = statistics.median(each.seconds for each in of_group)
        memory = statistics.median(each.resident_mb for each in of_group)
        rows.append([model, side, str(engines), f"{seconds:.1f}", f"{memory:,.0f}"])
    return heading, rows


def markdown(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heading = list(heading)
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(case: Case, median: Median | None, spread: bool) -> str:
    if median is None:
        return ""
    digits = 1 if median.value < 100 else 0
    text = f"{median.value:,.{digits}f}"
    if spread:
        text += f" ({median.lowest:,.{digits}f} to {median.highest:,.{digits}f})"
    return f"{text}, DP={median.engines}" if len(case.engines) > 1 else text
