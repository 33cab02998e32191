"""What a run looks like: live display, tables, JSON."""

import json
import math
import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from server.bench.config import BenchConfig
from server.bench.run import Progress
from server.bench.summary import Record, Summary, percentile

_TITLES = {
    "ttft": "first token (TTFT)",
    "tpot": "per token (TPOT)",
    "itl": "between deltas (ITL)",
    "e2el": "whole request (E2EL)",
}
_RATE_WINDOW_SECONDS = 2.0


class LiveDisplay:
    """Shows a run while it goes on."""

    def __init__(self, console: Console, planned: int) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("preparing", total=planned)
        self._live = Live(self._render(""), console=console, auto_refresh=False, transient=True)
        self._seen = 0
        self._first_tokens: list[float] = []
        self._failed = 0
        self._tokens: deque[tuple[float, int]] = deque()

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, progress: Progress) -> None:
        """Show the newest state."""
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
        self._live.update(self._render(line), refresh=True)

    def _line(self, progress: Progress) -> str:
        tokens = sum(progress.tokens.values())
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
        return (
            f"{sum(progress.running.values())} in flight   {rate:,.0f} output tok/s   "
            f"TTFT p50 {first}   {self._failed} failed"
        )

    def _render(self, line: str) -> RenderableType:
        return Group(self._bar, Text(line))


def summary_tables(summary: Summary, planned: int) -> list[Table]:
    """Return the tables of a result."""
    facts = Table(show_header=False, title="throughput", title_justify="left")
    facts.add_column()
    facts.add_column(justify="right")
    rows = [
        ("requests completed", f"{summary.completed:,}"),
        ("requests failed", f"{summary.failed:,}"),
        ("most in flight", f"{summary.max_concurrent_requests:,}"),
        ("duration", f"{summary.duration:.2f} s"),
        ("prompt tokens", f"{summary.total_input_tokens:,}"),
        ("output tokens", f"{summary.total_output_tokens:,}"),
        ("requests/s", f"{summary.request_throughput:,.2f}"),
        ("output tokens/s", f"{summary.output_throughput:,.1f}"),
        ("total tokens/s", f"{summary.total_token_throughput:,.1f}"),
    ]
    if summary.request_goodput is not None:
        rows.append(("good requests/s", f"{summary.request_goodput:,.2f}"))
    unsent = planned - summary.completed - summary.failed
    if unsent:
        rows.insert(2, ("requests not sent", f"{unsent:,}"))
    for row in rows:
        facts.add_row(*row)
    tables = [facts]
    if summary.latencies:
        tables.append(_latency_table(summary))
    return tables


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


def client_line(progress: Progress) -> str:
    """Return what the measuring itself cost."""
    costs = list(progress.costs.values())
    if not costs:
        return ""
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


def error_table(summary: Summary, records: Sequence[Record]) -> Table:
    """Return how often each kind of failure happened, with what was said once."""
    details = {record.error: record.detail for record in records}
    table = Table("failure", "count", "for example", title="failures", title_justify="left")
    for kind, count in sorted(summary.errors.items()):
        table.add_row(kind, str(count), Text(details.get(kind, "")))
    return table


def result_json(
    config: BenchConfig, progress: Progress, summary: Summary, warnings: list[str]
) -> dict[str, Any]:
    """Return the result for a file; latencies under the names that vLLM's benchmark gives them."""
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": config.target.address,
        "backend": config.target.backend,
        "model_id": progress.model,
        "num_prompts": progress.planned,
        "request_rate": _finite(config.traffic.request_rate) or "inf",
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
            {**msgspec.to_builtins(cost), "cpu_share": cost.cpu_share}
            for cost in progress.costs.values()
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


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def dump(result: dict[str, Any]) -> str:
    """Return the result as text."""
    return json.dumps(result, indent=2) + "\n"
