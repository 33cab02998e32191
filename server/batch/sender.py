"""Sends the requests of a batch, some at a time, retrying each until its answer is final."""

import asyncio
import random
from collections.abc import Callable, Iterator

import msgspec

from server.batch.config import BatchConfig
from server.batch.lines import BatchError, BatchRequest, BatchResponse, BatchResult, new_id
from server.bench.connection import BadAnswer, HttpClient

_BUSY = (429, 502, 503, 504)
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 30.0
_CHECK_SECONDS = 30.0


class ServerUnusable(Exception):
    """There is no server, or none that lets this client in."""


async def send_all(
    base_url: str,
    config: BatchConfig,
    requests: Iterator[BatchRequest],
    done: Callable[[BatchResult], None],
) -> None:
    """Send all requests to a server; tell of each result as soon as there is one.

    Raises:
        ServerUnusable: no server answers, before any request is counted as failed.
    """
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    try:
        client = HttpClient(base_url, headers)
        async with asyncio.timeout(_CHECK_SECONDS):
            models = await client.request("GET", "/v1/models")
    except (OSError, ValueError, BadAnswer) as error:
        raise ServerUnusable(f"{base_url} does not answer: {error}") from error
    if models.status != 200:
        said = models.body.decode(errors="replace")
        raise ServerUnusable(f"{base_url} answers {models.status}: {said}")

    async def work() -> None:
        for request in requests:  # one iterator for all workers: each takes the next
            done(await _send(client, request, config))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(config.max_concurrency):
                group.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        client.close()


async def _send(client: HttpClient, request: BatchRequest, config: BatchConfig) -> BatchResult:
    """Send one request until it is answered, or has been sent often enough."""
    name, body = new_id(), bytes(request.body)
    for attempt in range(config.max_retries + 1):
        last, asked_wait = attempt == config.max_retries, None
        try:
            async with asyncio.timeout(config.request_timeout):
                answer = await client.request("POST", request.url, body, name=name)
        except (OSError, BadAnswer) as error:
            timed_out = isinstance(error, TimeoutError)
            if last or timed_out:
                code = "request_timeout" if timed_out else "connection_error"
                why = BatchError(code, f"{type(error).__name__}: {error}")
                return BatchResult(id=name, custom_id=request.custom_id, error=why)
        else:
            if last or answer.status not in _BUSY:
                text = bytes(answer.body)
                try:
                    msgspec.json.decode(text)
                except (ValueError, RecursionError):
                    text = msgspec.json.encode(text.decode(errors="replace"))
                response = BatchResponse(
                    answer.status, answer.headers.get("x-request-id", ""), msgspec.Raw(text)
                )
                return BatchResult(id=name, custom_id=request.custom_id, response=response)
            asked_wait = answer.headers.get("retry-after")
        await asyncio.sleep(_wait(attempt, asked_wait))
    raise AssertionError("the last attempt returns")


def _wait(attempt: int, asked: str | None) -> float:
    """Return the seconds until the next try, a little different for everybody."""
    if asked is not None and asked.isdecimal():
        return min(float(asked), _LONGEST_WAIT) * random.uniform(1.0, 1.25)
    return min(_FIRST_WAIT * 2.0**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1.25)
