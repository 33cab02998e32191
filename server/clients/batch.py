"""`swell run-batch`: from settings to a finished output file."""

import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
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

from server.clients.batch_config import BatchConfig, RunBatchConfig
from server.clients.batch_lines import (
    Attempt,
    BadLine,
    BatchError,
    BatchRequest,
    BatchResponse,
    BatchResult,
    OutputBusy,
    OutputFile,
    new_id,
    read_request,
)
from server.fleet.local_server import LocalServer, ServerFailed, serve_arguments

_BUSY = (429, 502, 503, 504)
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 30.0
_CHECK_SECONDS = 30.0


class ServerUnusable(Exception):
    """The server is unreachable or denies access."""


async def send_all(
    base_url: str,
    config: BatchConfig,
    requests: Iterator[BatchRequest],
    done: Callable[[BatchResult], None],
) -> None:
    """Send all requests to a server; report each result as soon as it arrives.

    Raises:
        ServerUnusable: no server responds, before any request is counted as failed.
    """
    headers = {"content-type": "application/json"}
    if config.api_key is not None:
        headers["authorization"] = f"Bearer {config.api_key}"
    async with httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(config.request_timeout, connect=10.0),
        limits=httpx.Limits(max_connections=config.max_concurrency),
        trust_env=False,
    ) as client:
        try:
            models = await client.get("/v1/models", timeout=_CHECK_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnusable(f"{base_url} does not answer: {error}") from error
        if models.status_code != 200:
            raise ServerUnusable(f"{base_url} answers {models.status_code}: {models.text}")

        async def work() -> None:
            for request in requests:  # one iterator shared by all workers
                done(await _send(client, request, config.max_retries))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(config.max_concurrency):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


async def _send(client: httpx.AsyncClient, request: BatchRequest, max_retries: int) -> BatchResult:
    name, body = new_id(), bytes(request.body)
    for attempt in range(max_retries + 1):
        last, retry_after = attempt == max_retries, None
        try:
            answer = await client.post(request.url, content=body, headers={"x-request-id": name})
        except httpx.HTTPError as error:
            if last or isinstance(error, httpx.ReadTimeout):
                timed_out = isinstance(error, httpx.TimeoutException)
                code = "request_timeout" if timed_out else "connection_error"
                why = BatchError(code, f"{type(error).__name__}: {error}")
                return BatchResult(id=name, custom_id=request.custom_id, error=why)
        else:
            if last or answer.status_code not in _BUSY:
                text = answer.content
                try:
                    msgspec.json.decode(text)
                except (ValueError, RecursionError):
                    text = msgspec.json.encode(answer.text)
                response = BatchResponse(
                    answer.status_code, answer.headers.get("x-request-id", ""), msgspec.Raw(text)
                )
                return BatchResult(id=name, custom_id=request.custom_id, response=response)
            retry_after = answer.headers.get("retry-after")
        await asyncio.sleep(_wait(attempt, retry_after))
    raise AssertionError("the last attempt returns")


def _wait(attempt: int, retry_after: str | None) -> float:
    if retry_after is not None and retry_after.isdecimal():
        return min(float(retry_after), _LONGEST_WAIT) * random.uniform(1.0, 1.25)
    return min(_FIRST_WAIT * 2.0**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1.25)


def run_batch(config: RunBatchConfig) -> int:
    """Run a batch; return 0 if every request was answered or refused, else 1."""
    console = Console(stderr=True)
    # SIGTERM ends a run as Ctrl-C does: answered requests are already in the file.
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
                    own = LocalServer(serve_arguments(config), config.supervisor.startup_timeout)
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
                description = f"requests, {failures} without success" if failures else "requests"
                bar.update(task, advance=1, description=description)

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
    for each in _attempts(lines):
        if not isinstance(each, BadLine) and each.custom_id not in answered:
            yield each


def _attempts(lines: Iterator[bytes]) -> Iterator[Attempt]:
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
