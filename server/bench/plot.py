"""A picture of a run; the only part that needs matplotlib."""

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from engine.shared.plugins import install_command
from server.bench.config import BenchError
from server.bench.summary import Record, percentile

_BINS = 60


def check_plotting() -> None:
    """Find out before a run that its plot can be drawn.

    Raises:
        BenchError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"--plot needs matplotlib: {install_command('plot')}")


def token_times(record: Record) -> list[float]:
    """Return when each delta of a request arrived, in seconds after the start."""
    if record.first_token is None:
        return []
    first = record.started + record.first_token
    return list(accumulate(record.inter_token_latencies(), initial=first))


def save_plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Draw latencies and throughput of the successful requests into a PNG file."""
    from matplotlib.figure import Figure

    good = [record for record in records if record.error is None]
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    figure.suptitle(f"{len(good)} requests to {title}")
    (throughput, latency), (first, gaps) = figure.subplots(2, 2)
    duration = max((record.started + record.total for record in good), default=0.0) or 1.0
    times, rates = [], []
    for record in good:
        arrivals = token_times(record) or [record.started + record.total]
        times += arrivals
        rates += [record.output_tokens / len(arrivals) * _BINS / duration] * len(arrivals)
    throughput.hist(times, _BINS, (0, duration), weights=rates, histtype="step")
    throughput.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    latency.plot(
        [record.started for record in good], [1000 * record.total for record in good], ".", ms=3
    )
    latency.set(xlabel="sent at, seconds", ylabel="whole request, ms", ylim=(0, None))
    for axes, name, values in (
        (first, "time to first token, ms", [r.first_token for r in good if r.first_token]),
        (gaps, "between deltas, ms", [g for r in good for g in r.inter_token_latencies()]),
    ):
        axes.set(xlabel=name, ylabel="share of all", ylim=(0, 1.02))
        if not values:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
            continue
        ordered = sorted(1000 * value for value in values)
        axes.ecdf(ordered)
        for percent in (50, 99):
            value = percentile(ordered, percent)
            axes.axvline(value, ls="--", lw=0.8, color="gray")
            axes.text(value, 0.02, f" p{percent} {value:.1f}", rotation=90, va="bottom", fontsize=8)
    figure.savefig(path, format="png")
