"""Sends the requests of a batch, some at a time, retrying each until its answer is final."""

import asyncio
import random
from collections.abc import Callable, Iterator

import httpx
import msgspec

from server.batch.config import BatchConfig
from server.batch.lines import BatchError, BatchRequest, BatchResponse, BatchResult, new_id

_BUSY = (429, 502, 503, 504)
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 30.0


class ServerUnusable(Exception):
    """There is no server, or none that lets this client in."""


def check_server(base_url: str, config: BatchConfig) -> None:
    """Make sure that a server answers, before any request is counted as failed.

    Raises:
        ServerUnusable: it does not.
    """
    try:
        answer = httpx.get(
            f"{base_url}/v1/models", headers=_headers(config), timeout=30.0, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnusable(f"{base_url} does not answer: {error}") from error
    if answer.status_code != 200:
        raise ServerUnusable(f"{base_url} answers {answer.status_code}: {answer.text}")


def _headers(config: BatchConfig) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if config.api_key is not None:
        headers["authorization"] = f"Bearer {config.api_key}"
    return headers


async def send_all(
    base_url: str,
    config: BatchConfig,
    requests: Iterator[BatchRequest],
    done: Callable[[BatchResult], None],
) -> None:
    """Send all requests to a server; tell of each result as soon as there is one."""
    async with httpx.AsyncClient(
        base_url=base_url,
        headers=_headers(config),
        timeout=httpx.Timeout(config.request_timeout, connect=10.0),
        limits=httpx.Limits(max_connections=config.max_concurrency),
        trust_env=False,
    ) as client:

        async def work() -> None:
            for request in requests:  # one iterator for all workers: each takes the next
                done(await _send(client, request, config.max_retries))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(config.max_concurrency):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


async def _send(client: httpx.AsyncClient, request: BatchRequest, max_retries: int) -> BatchResult:
    """Send one request until it is answered, or has been sent often enough."""
    name = new_id()
    for attempt in range(max_retries + 1):
        last = attempt == max_retries
        try:
            answer = await client.post(
                request.url, content=bytes(request.body), headers={"x-request-id": name}
            )
        except httpx.HTTPError as error:
            if last or isinstance(error, httpx.ReadTimeout):
                code = (
                    "request_timeout"
                    if isinstance(error, httpx.TimeoutException)
                    else ("connection_error")
                )
                message = f"{type(error).__name__}: {error}"
                return BatchResult(
                    id=name, custom_id=request.custom_id, error=BatchError(code, message)
                )
            await asyncio.sleep(_wait(attempt, None))
            continue
        if last or answer.status_code not in _BUSY:
            return BatchResult(id=name, custom_id=request.custom_id, response=_response(answer))
        await asyncio.sleep(_wait(attempt, answer.headers.get("retry-after")))
    raise AssertionError("the last attempt returns")


def _wait(attempt: int, asked: str | None) -> float:
    """Return the seconds until the next try, a little different for everybody."""
    if asked is not None and asked.isdecimal():
        return min(float(asked), _LONGEST_WAIT) * random.uniform(1.0, 1.25)
    return min(_FIRST_WAIT * 2.0**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1.25)


def _response(answer: httpx.Response) -> BatchResponse:
    try:
        msgspec.json.decode(answer.content)
        body = answer.content
    except (ValueError, RecursionError):
        body = msgspec.json.encode(answer.text)
    return BatchResponse(
        answer.status_code, answer.headers.get("x-request-id", ""), msgspec.Raw(body)
    )
