"""`swell run-batch`: from settings to a finished output file."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from server.batch.config import BatchConfig, RunBatchConfig
from server.batch.lines import BadLine, BatchResult, read_request
from server.batch.output import OutputBusy, OutputFile
from server.batch.own_server import OwnServer, ServerFailed
from server.batch.sender import Attempt, ServerUnusable, check_server, send_all


class _Tally(msgspec.Struct):
    """What has come of the requests of this run."""

    succeeded: int = 0
    refused: int = 0
    failed: int = 0

    def count(self, result: BatchResult) -> None:
        if result.succeeded:
            self.succeeded += 1
        elif result.response is not None:
            self.refused += 1
        else:
            self.failed += 1


def run_batch(config: RunBatchConfig) -> int:
    """Run a batch; return 0 if every request has a successful answer, else 1."""
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
    tally = _Tally()
    with OutputFile(Path(batch.output_file)) as output, ExitStack() as stack:
        with source.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
        with source.open("rb") as lines:
            kinds = [isinstance(each, BadLine) for each in _requests(lines, output.answered)]
        left = len(kinds)
        if left:
            url = (batch.url or "").rstrip("/")
            if not all(kinds):  # lines that are no requests need no server
                if not url:
                    with console.status("starting a server"):
                        url = stack.enter_context(OwnServer(config)).url
                check_server(url, batch)
            _send(source, (total, left), batch, url, output, tally, console)
    console.print(
        f"{batch.output_file}: {tally.succeeded} answered, {tally.refused} refused by the server, "
        f"{tally.failed} failed; {total - left} had been answered before",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if tally.refused + tally.failed == 0 and not output.num_refused else 1


def _send(
    source: Path,
    counts: tuple[int, int],
    batch: BatchConfig,
    url: str,
    output: OutputFile,
    tally: _Tally,
    console: Console,
) -> None:
    """Send what is left; `counts` are all requests, and those."""
    total, left = counts
    with (
        source.open("rb") as lines,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress,
    ):
        task = progress.add_task("requests", total=total, completed=total - left)

        def done(result: BatchResult) -> None:
            output.append(result)
            tally.count(result)
            failures = tally.refused + tally.failed
            progress.update(
                task,
                advance=1,
                description=f"requests, {failures} without success" if failures else "requests",
            )

        asyncio.run(send_all(url, batch, _requests(lines, output.answered), done))


def _requests(lines: Iterator[bytes], answered: set[str]) -> Iterator[Attempt]:
    """Yield what is left to do: requests, and lines that are none."""
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
        elif name not in answered:
            yield request
        seen.add(name)
