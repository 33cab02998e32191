"""Requests to a running stack, each on a new connection, so that any front end can get it."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from email.message import Message
from typing import Any, NamedTuple

from tests.support.waiting import PATIENCE, until

MODEL = "swell-shakespeare"
"""Served name of the bundled model."""
ADMIN_KEY = "admin-secret"
"""Key sent with all calls; stacks whose tests use admin endpoints are started with it."""


class Answer(NamedTuple):
    """Result of a request."""

    status: int
    """HTTP status; 0 if there was no answer."""
    text: str
    headers: Message = Message()

    def __repr__(self) -> str:
        return f"{self.status} {self.text[:500]}"

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI-style error in its body."""
        error: dict[str, Any] = json.loads(self.text)["error"]
        return error


def fetch(
    url: str,
    body: object = None,
    *,
    key: str | None = ADMIN_KEY,
    rank: int | None = None,
    accept: str = "*/*",
    timeout: float = PATIENCE,
) -> Answer:
    """Send a GET, or a POST with a JSON body, to one engine if a rank is given."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept": accept}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Answer(answer.status, answer.read().decode(), answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), error.headers)
    except (OSError, http.client.HTTPException) as error:  # or it was disconnected
        return Answer(0, str(error))


def call(url: str, body: object = None, **options: Any) -> dict[str, Any]:
    """Return the JSON of a successful answer.

    Raises:
        ConnectionError: there was no answer.
        AssertionError: the answer is an error.
    """
    answer = fetch(url, body, **options)
    if answer.status == 0:
        raise ConnectionError(answer.text)
    assert answer.status == 200, f"{url}: {answer}"
    result: dict[str, Any] = json.loads(answer.text)
    return result


def completion(prompt: str, tokens: int, **more: object) -> dict[str, Any]:
    """Return a request body for a completion of exactly `tokens` tokens."""
    fixed = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return fixed | more


def complete(url: str, prompt: str, tokens: int, rank: int | None = None, **more: object) -> str:
    """Return the greedy completion of a prompt, with exactly `tokens` tokens.

    With a rank, retry until the front end that answers is connected to that engine.
    """
    body = completion(prompt, tokens, **({"temperature": 0} | more))
    answers: list[Answer] = []

    def is_answered() -> bool:
        answers[:] = [fetch(f"{url}/v1/completions", body, rank=rank)]
        return rank is None or answers[0].status != 503

    until(is_answered, "the engine takes requests", interval=0.05)
    status, text, _ = answers[0]
    if status == 0:
        raise ConnectionError(text)
    assert status == 200, f"{status}: {text}"
    content = json.loads(text)
    assert content["usage"]["completion_tokens"] == tokens
    return str(content["choices"][0]["text"])


LOOKS = 8
"""Number of requests that hardly ever all reach the same one of two front ends."""


def everywhere(condition: Callable[[], object]) -> bool:
    """Return whether a condition holds on repeated requests, and so on all front ends."""
    return all(condition() for _ in range(LOOKS))


def ready_ranks(url: str) -> set[int]:
    """Return the ready engines, as seen by the front end that answers."""
    return set(incarnations(url))


def incarnations(url: str, ranks: Iterable[int] = ()) -> dict[int, int]:
    """Return the incarnation of each ready engine, as seen by the front end that answers.

    It may be outdated: waits until `ranks` are among them.
    """
    found: dict[int, int] = {}

    def all_are_ready() -> bool:
        engines = call(f"{url}/status.json")["engines"]
        found.clear()
        found.update({each["rank"]: each["incarnation"] for each in engines if each["ready"]})
        return set(ranks) <= found.keys()

    until(all_are_ready, "the engines are ready")
    return found


def are_replaced(url: str, before: dict[int, int], ranks: Iterable[int]) -> bool:
    """Return whether these engines are ready and are different processes than before."""
    now = incarnations(url)
    return all(rank in now and now[rank] != before[rank] for rank in ranks)
