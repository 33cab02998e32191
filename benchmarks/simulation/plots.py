"""Figures. Matplotlib is an extra: it is loaded only when something is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.simulation.calibration import POLICIES, Case, Mean
from benchmarks.simulation.records import Recorder
from benchmarks.simulation.workload import NS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "none": "0.55",
    "balance": "tab:orange",
    "cadence 2": "tab:olive",
    "cadence 4": "tab:green",
    "level": "tab:blue",
}
_BAR_LOADS = ("pub", "var", "mixed", "over", "under", "sync", "dp8 pub", "dp8 var")
_BAR_POLICIES = ("balance", "cadence 2", "cadence 4", "level")


class PlottingUnavailable(RuntimeError):
    """Matplotlib is not installed; the message says how to get it."""


def load_pyplot() -> Any:
    """Return `matplotlib.pyplot`, drawing into files only.

    Raises:
        PlottingUnavailable: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise PlottingUnavailable(
            "drawing needs matplotlib: pip install 'swell[plot]', or leave --plot out"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_run(recorder: Recorder, title: str, path: Path) -> None:
    """Draw one run: running and waiting over time, tokens over time, and latency CDFs."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    _draw_timeline(axes[0][0], recorder)
    _draw_rate(axes[0][1], {"": recorder})
    done = [record for record in recorder.records if record.finished]
    _draw_cdf(axes[1][0], {"TTFT": [(r.first - r.arrived) / NS for r in done]}, "TTFT s")
    _draw_cdf(
        axes[1][1],
        {
            "TPOT": [
                (r.last - r.first) / 1e6 / (r.spec.output_tokens - 1)
                for r in done
                if r.spec.output_tokens > 1
            ]
        },
        "TPOT ms",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_calibration(
    means: Mapping[Case, Mean], published: Mapping[str, Recorder], path: Path
) -> None:
    """Draw the gains of all policies, and three policies on the published load in detail."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle("Admission policies on the calibrated group C1 (simulation)")
    _draw_gains(axes[0][0], means)
    _draw_rate(axes[0][1], published)
    axes[0][1].set_title("published load: output tokens over time")
    ttft = {
        name: [(r.first - r.arrived) / NS for r in recorder.records]
        for name, recorder in published.items()
    }
    _draw_cdf(axes[1][0], ttft, "TTFT s")
    axes[1][0].set_title("published load: time to first token")
    gaps = {name: recorder.gaps for name, recorder in published.items()}
    for name, counts in gaps.items():
        seen, points = 0, []
        for value, count in sorted(counts.items()):
            seen += count
            points.append((value / 1e6, seen / counts.total()))
        x, y = zip(*points, strict=True)
        axes[1][1].plot(x, y, label=name, color=_COLOURS.get(name))
    axes[1][1].set(xscale="log", xlabel="ITL ms", ylabel="share of tokens", ylim=(0.5, 1.0))
    axes[1][1].set_title("published load: time between tokens")
    axes[1][1].grid(alpha=0.3)
    axes[1][1].legend(loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_gains(axes: "Axes", means: Mapping[Case, Mean]) -> None:
    assert set(_BAR_POLICIES) <= set(POLICIES)
    width = 0.8 / len(_BAR_POLICIES)
    for index, policy in enumerate(_BAR_POLICIES):
        gains = [
            100 * (means[Case(load, policy)].rate / means[Case(load, "none")].rate - 1)
            for load in _BAR_LOADS
        ]
        places = [place + (index - 1.5) * width for place in range(len(_BAR_LOADS))]
        axes.bar(places, gains, width, label=policy, color=_COLOURS[policy])
    axes.set_xticks(range(len(_BAR_LOADS)), _BAR_LOADS)
    axes.set_ylabel("output tok/s over none, %")
    axes.set_title("throughput gain by load")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()


def _draw_timeline(axes: "Axes", recorder: Recorder) -> None:
    times = [sample.at / NS for sample in recorder.samples]
    engines = len(recorder.steps)
    axes.fill_between(
        times,
        [sample.least_running for sample in recorder.samples],
        [sample.most_running for sample in recorder.samples],
        alpha=0.3,
        label="least to most on one engine",
    )
    axes.plot(times, [s.running / engines for s in recorder.samples], label="running per engine")
    axes.plot(times, [s.waiting / engines for s in recorder.samples], label="waiting per engine")
    axes.set(xlabel="virtual time s", ylabel="requests")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_rate(axes: "Axes", recorders: Mapping[str, Recorder]) -> None:
    for name, recorder in recorders.items():
        times = [sample.at / NS for sample in recorder.samples]
        tokens = [sample.tokens / 1e3 for sample in recorder.samples]
        axes.plot(times, tokens, label=name or None, color=_COLOURS.get(name))
    axes.set(xlabel="virtual time s", ylabel="output tokens, thousands")
    axes.grid(alpha=0.3)
    if len(recorders) > 1:
        axes.legend()


def _draw_cdf(axes: "Axes", series: Mapping[str, Sequence[float]], label: str) -> None:
    for name, values in series.items():
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.plot(ordered, shares, label=name, color=_COLOURS.get(name))
    axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
