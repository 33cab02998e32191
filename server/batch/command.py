"""`swell run-batch`: from settings to a finished output file."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from server.batch.config import RunBatchConfig
from server.batch.lines import Attempt, BadLine, BatchRequest, BatchResult, read_request
from server.batch.output import OutputBusy, OutputFile
from server.batch.sender import ServerUnusable, send_all
from server.fleet.own_server import OwnServer, ServerFailed, serve_arguments


def run_batch(config: RunBatchConfig) -> int:
    """Run a batch; return 0 if every request was answered or refused, else 1."""
    console = Console(stderr=True)
    # SIGTERM ends a run as Ctrl-C does: what was answered is in the file.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(config, console)
    except (OSError, OutputBusy, ServerFailed, ServerUnusable) as error:
        print(f"swell run-batch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("swell run-batch: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(config: RunBatchConfig, console: Console) -> int:
    batch = config.batch
    if not batch.input_file or not batch.output_file:
        print("swell run-batch: an input file and an output file are needed", file=sys.stderr)
        return 2
    source = Path(batch.input_file)
    came = Counter[str]()
    with OutputFile(Path(batch.output_file)) as output, ExitStack() as stack:
        with source.open("rb") as lines:
            bad = [isinstance(each, BadLine) for each in _attempts(lines)]
        before = len(output.answered)
        with source.open("rb") as lines:
            left = sum(1 for _ in _unanswered(lines, output.answered))
        if left:
            url = (batch.url or "").rstrip("/")
            if not url:
                with console.status("starting a server"):
                    own = OwnServer(serve_arguments(config), config.supervisor.startup_timeout)
                    url = stack.enter_context(own).url
            bar = stack.enter_context(
                Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeElapsedColumn(),
                    TimeRemainingColumn(),
                    console=console,
                )
            )
            task = bar.add_task("requests", total=len(bad), completed=len(bad) - left)

            def done(result: BatchResult) -> None:
                output.append(result)
                came[result.outcome] += 1
                failures = came["refused"] + came["failed"]
                told = f"requests, {failures} without success" if failures else "requests"
                bar.update(task, advance=1, description=told)

            requests = _unanswered(stack.enter_context(source.open("rb")), {*output.answered})
            asyncio.run(send_all(url, batch, requests, done))
        with source.open("rb") as lines:
            output.order(_attempts(lines))
    console.print(
        f"{batch.output_file}: {came['answered']} answered, {came['refused']} refused by the "
        f"server, {came['failed']} failed, {sum(bad)} lines that are no requests; "
        f"{before} had been answered before",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if came["failed"] else 0


def _unanswered(lines: Iterator[bytes], answered: Collection[str]) -> Iterator[BatchRequest]:
    """Yield the requests that are left to send."""
    for each in _attempts(lines):
        if not isinstance(each, BadLine) and each.custom_id not in answered:
            yield each


def _attempts(lines: Iterator[bytes]) -> Iterator[Attempt]:
    """Yield what the lines are: requests, each by a name of its own, or none."""
    seen: set[str] = set()
    for line in lines:
        if not line.strip():
            continue
        try:
            request = read_request(line)
        except BadLine as error:
            yield error
            continue
        name = request.custom_id
        if name in seen:
            yield BadLine(
                "duplicate_custom_id", f"custom_id: {name!r} is on an earlier line too", name
            )
        else:
            yield request
        seen.add(name)
