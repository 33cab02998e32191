"""`swell bench`: from settings to a report."""

import signal
import sys
from pathlib import Path

from rich.console import Console

from engine.shared.writable import writable_file
from server.bench import report
from server.bench.config import BenchConfig, BenchError
from server.bench.plot import check_plotting, save_plot
from server.bench.run import Progress, run
from server.bench.summary import Summary, client_warnings, parse_goodput, summarize


def bench(config: BenchConfig) -> int:
    """Run a benchmark, print and save its result; return the exit code."""
    console = Console(stderr=True)
    # SIGTERM ends a run as Ctrl-C does: sending processes stop and what was measured is shown.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        limits = parse_goodput(config.report.goodput)
        if config.report.plot is not None:
            check_plotting()
        for path in (config.report.output, config.report.plot):
            if path is not None:
                writable_file(path)
        progress = _run(config, console)
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
        list(progress.costs.values()),
        delay.percentiles.get(99, delay.max) if delay else 0.0,
        open_loop=config.traffic.max_concurrency is None
        and config.traffic.request_rate != float("inf"),
    )
    _print(config, progress, summary, warnings)
    _save(config, progress, summary, warnings)
    cut_off = summary.errors.get("cut_off", 0)  # by --time-limit
    return 0 if summary.completed and summary.failed == cut_off else 1


def _print(config: BenchConfig, progress: Progress, summary: Summary, warnings: list[str]) -> None:
    out = Console()
    out.print(f"[bold]{progress.model}[/] at {config.target.address}, {config.target.backend}")
    for table in report.summary_tables(summary, progress.planned):
        out.print(table)
    if summary.errors:
        out.print(report.error_table(summary, progress.records))
    out.print(report.client_line(progress), highlight=False)
    for warning in warnings:
        out.print(f"[bold yellow]warning:[/] {warning}", highlight=False)


def _save(config: BenchConfig, progress: Progress, summary: Summary, warnings: list[str]) -> None:
    if config.report.output is not None:
        result = report.result_json(config, progress, summary, warnings)
        Path(config.report.output).write_text(report.dump(result), encoding="utf-8")
    if config.report.plot is not None:
        save_plot(Path(config.report.plot), progress.records, config.target.address)


def _run(config: BenchConfig, console: Console) -> Progress:
    if not (config.report.progress and console.is_terminal):
        return run(config, lambda _: None)
    with report.LiveDisplay(console, config.workload.num_prompts) as display:
        return run(config, display.update)
