"""`swell bench`: runs a benchmark with a live display, prints and saves the result."""

import importlib.util
import json
import math
import signal
import sys
import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from engine.shared.plugins import install_command
from engine.shared.writable import writable_file
from server.bench.config import BenchConfig, BenchError
from server.bench.run import Progress, run
from server.bench.summary import (
    Record,
    Summary,
    client_warnings,
    parse_goodput,
    percentile,
    summarize,
)

_TITLES = {
    "ttft": "first token (TTFT)",
    "tpot": "per token (TPOT)",
    "itl": "between deltas (ITL)",
    "e2el": "whole request (E2EL)",
}
_RATE_WINDOW_SECONDS = 2.0
_BINS = 60


def bench(config: BenchConfig) -> int:
    """Run a benchmark, print and save its result; return the exit code."""
    output, plot = config.report.output, config.report.plot
    # SIGTERM ends a run as Ctrl-C does: sending processes stop, and partial results are shown.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        limits = parse_goodput(config.report.goodput)
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise BenchError(f"--plot needs matplotlib: {install_command('plot')}")
        for path in (output, plot):
            if path is not None:
                writable_file(path)
        progress = _run(config)
    except (BenchError, ValueError, OSError) as error:
        print(f"swell bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("swell bench: interrupted before the measurement began", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    summary = summarize(progress.records, config.report.metric_percentiles, limits)
    delay = summary.schedule_delay
    warnings = client_warnings(
        progress.costs,
        delay.percentiles.get(99, delay.max) if delay else 0.0,
        open_loop=config.traffic.max_concurrency is None
        and config.traffic.request_rate != float("inf"),
    )
    _print(config, progress, summary, warnings)
    if output is not None:
        result = _result(config, progress, summary, warnings)
        Path(output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        _save_plot(Path(plot), progress.records, config.target.address)
    cut_off = summary.errors.get("cut_off", 0)  # by --time-limit
    return 0 if summary.completed and summary.failed == cut_off else 1


def _run(config: BenchConfig) -> Progress:
    console = Console(stderr=True)
    if not (config.report.progress and console.is_terminal):
        return run(config, lambda _: None)
    display = _LiveDisplay(console, config.workload.num_prompts)
    with display.live:
        return run(config, display.update)


class _LiveDisplay:
    """Shows the progress of a run."""

    def __init__(self, console: Console, planned: int) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("preparing", total=planned)
        self.live = Live(self._bar, console=console, auto_refresh=False, transient=True)
        self._seen = 0
        self._first_tokens: list[float] = []
        self._failed = 0
        self._tokens: deque[tuple[float, int]] = deque()

    def update(self, progress: Progress) -> None:
        """Show the latest progress."""
        for record in progress.records[self._seen :]:
            self._failed += record.error is not None
            if record.first_token is not None:
                insort(self._first_tokens, record.first_token)
        self._seen = len(progress.records)
        description = "warming up" if progress.model else "preparing"
        line = ""
        if progress.started_at:
            description = "measuring"
            line = self._line(progress)
        self._bar.update(self._task, completed=self._seen, description=description)
        self.live.update(Group(self._bar, Text(line)), refresh=True)

    def _line(self, progress: Progress) -> str:
        tokens = sum(report.tokens for report in progress.newest.values())
        if not self._tokens or tokens != self._tokens[-1][1]:
            self._tokens.append((time.monotonic(), tokens))
        (now, after) = self._tokens[-1]
        while now - self._tokens[0][0] > _RATE_WINDOW_SECONDS:
            self._tokens.popleft()
        then, before = self._tokens[0]
        rate = (after - before) / (now - then) if now > then else 0.0
        first = "-"
        if self._first_tokens:
            first = f"{1000 * percentile(self._first_tokens, 50):.1f} ms"
        running = sum(report.running for report in progress.newest.values())
        return (
            f"{running} in flight   {rate:,.0f} output tok/s   "
            f"TTFT p50 {first}   {self._failed} failed"
        )


def _print(config: BenchConfig, progress: Progress, summary: Summary, warnings: list[str]) -> None:
    out = Console()
    out.print(f"[bold]{progress.model}[/] at {config.target.address}, {config.target.backend}")
    out.print(_throughput_table(summary, progress.planned))
    if summary.latencies:
        out.print(_latency_table(summary))
    if summary.errors:
        details = {record.error: record.detail for record in progress.records}
        table = Table("failure", "count", "for example", title="failures", title_justify="left")
        for kind, count in sorted(summary.errors.items()):
            table.add_row(kind, str(count), Text(details.get(kind, "")))
        out.print(table)
    if progress.costs:
        out.print(_client_line(progress), highlight=False)
    for warning in warnings:
        out.print(f"[bold yellow]warning:[/] {warning}", highlight=False)


def _throughput_table(summary: Summary, planned: int) -> Table:
    table = Table(show_header=False, title="throughput", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests completed", f"{summary.completed:,}")
    table.add_row("requests failed", f"{summary.failed:,}")
    unsent = planned - summary.completed - summary.failed
    if unsent:
        table.add_row("requests not sent", f"{unsent:,}")
    table.add_row("most in flight", f"{summary.max_concurrent_requests:,}")
    table.add_row("duration", f"{summary.duration:.2f} s")
    table.add_row("prompt tokens", f"{summary.total_input_tokens:,}")
    table.add_row("output tokens", f"{summary.total_output_tokens:,}")
    table.add_row("requests/s", f"{summary.request_throughput:,.2f}")
    table.add_row("output tokens/s", f"{summary.output_throughput:,.1f}")
    table.add_row("total tokens/s", f"{summary.total_token_throughput:,.1f}")
    if summary.request_goodput is not None:
        table.add_row("good requests/s", f"{summary.request_goodput:,.2f}")
    return table


def _latency_table(summary: Summary) -> Table:
    table = Table(title="latency, ms", title_justify="left")
    percents = list(next(iter(summary.latencies.values())).percentiles)
    table.add_column("")
    for name in ["mean", *(f"p{percent:g}" for percent in percents), "max"]:
        table.add_column(name, justify="right")
    for name, found in summary.latencies.items():
        values = [found.mean, *found.percentiles.values(), found.max]
        table.add_row(_TITLES[name], *(f"{value:,.2f}" for value in values))
    return table


def _client_line(progress: Progress) -> str:
    costs = progress.costs
    cpu = sum(cost.cpu_seconds for cost in costs)
    deltas = sum(cost.deltas for cost in costs)
    per_delta = f", {1e6 * cpu / deltas:.0f} µs per delta" if deltas else ""
    busiest = max(cost.cpu_share for cost in costs)
    lag = max(cost.loop_lag_p99 for cost in costs)
    worst = max(cost.loop_lag_max for cost in costs)
    wall = max(cost.wall_seconds for cost in costs)
    display = progress.parent_cpu_seconds / wall if wall else 0.0
    return (
        f"client: {cpu:.2f} s CPU in {len(costs)} process(es) (busiest {100 * busiest:.0f} % of a "
        f"core{per_delta}), display {100 * display:.0f} %, event loop late by "
        f"{1000 * lag:.1f} ms at p99, {1000 * worst:.1f} ms at most"
    )


def _result(
    config: BenchConfig, progress: Progress, summary: Summary, warnings: list[str]
) -> dict[str, Any]:
    """Return the result for a file; latencies have the names that vLLM's benchmark uses."""
    rate = config.traffic.request_rate
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": config.target.address,
        "backend": config.target.backend,
        "model_id": progress.model,
        "num_prompts": progress.planned,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": config.traffic.burstiness,
        "max_concurrency": config.traffic.max_concurrency,
        "workload": msgspec.to_builtins(config.workload),
    }
    facts = msgspec.to_builtins(summary)
    del facts["latencies"], facts["schedule_delay"]
    result |= facts
    for name, found in summary.latencies.items():
        result |= {
            f"mean_{name}_ms": found.mean,
            f"std_{name}_ms": found.std,
            f"max_{name}_ms": found.max,
        }
        result |= {
            "median_" + name + "_ms" if percent == 50 else f"p{percent:g}_{name}_ms": value
            for percent, value in found.percentiles.items()
        }
    result["client"] = {
        "processes": [
            {**msgspec.to_builtins(cost), "cpu_share": cost.cpu_share} for cost in progress.costs
        ],
        "schedule_delay_ms": msgspec.to_builtins(summary.schedule_delay, str_keys=True),
        "warnings": warnings,
    }
    if config.report.save_detailed:
        result["requests"] = [
            {
                **msgspec.to_builtins(record),
                "gaps": [round(gap, 6) for gap in array("f", record.gaps)],
            }
            for record in progress.records
        ]
    return result


def _save_plot(path: Path, records: Sequence[Record], title: str) -> None:
    from matplotlib.figure import Figure

    good = [record for record in records if record.error is None]
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    figure.suptitle(f"{len(good)} requests to {title}")
    (throughput, latency), (first, gaps) = figure.subplots(2, 2)
    duration = max((record.started + record.total for record in good), default=0.0) or 1.0
    times, rates = [], []
    for record in good:
        arrivals = [record.started + record.total]
        if record.first_token is not None:
            begin = record.started + record.first_token
            arrivals = list(accumulate(record.inter_token_latencies(), initial=begin))
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
