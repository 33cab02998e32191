"""Requests to a running stack, each over a connection of its own, so that any front end gets it."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from email.message import Message
from typing import Any, NamedTuple

from tests.support.waiting import PATIENCE, until

MODEL = "swell-shakespeare"
"""The name under which the bundled model is served."""
ADMIN_KEY = "admin-secret"
"""The key that all calls carry; stacks whose tests administrate them are started with it."""


class Answer(NamedTuple):
    """What became of a request."""

    status: int
    """0 if nobody answered."""
    text: str
    headers: Message = Message()

    def __repr__(self) -> str:
        return f"{self.status} {self.text[:500]}"

    @property
    def error(self) -> dict[str, Any]:
        """The error that its body is, as OpenAI shows errors."""
        error: dict[str, Any] = json.loads(self.text)["error"]
        return error


def fetch(
    url: str,
    body: object = None,
    *,
    key: str | None = ADMIN_KEY,
    rank: int | None = None,
    timeout: float = PATIENCE,
) -> Answer:
    """GET, or POST of a body as JSON, to one engine if a rank is given."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
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
    except (OSError, http.client.HTTPException) as error:  # or it has broken off
        return Answer(0, str(error))


def call(url: str, body: object = None, **options: Any) -> dict[str, Any]:
    """Return the JSON that a request is answered with when all goes well.

    Raises:
        ConnectionError: nobody answered.
        AssertionError: an error was answered.
    """
    answer = fetch(url, body, **options)
    if answer.status == 0:
        raise ConnectionError(answer.text)
    assert answer.status == 200, f"{url}: {answer}"
    result: dict[str, Any] = json.loads(answer.text)
    return result


def completion(prompt: str, tokens: int, **more: object) -> dict[str, Any]:
    """Return the body that asks for a completion of exactly so many tokens."""
    fixed = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return fixed | more


def complete(url: str, prompt: str, tokens: int, rank: int | None = None, **more: object) -> str:
    """Return the greedy completion of a prompt, exactly so many tokens.

    With a rank it waits until the front end that it happens to ask has met that engine.
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
"""Requests of which hardly ever all come to the same one of two front ends."""


def everywhere(condition: Callable[[], object]) -> bool:
    """Whether a condition holds that asks, and so whichever front end it is that answers."""
    return all(condition() for _ in range(LOOKS))


def ready_ranks(url: str) -> set[int]:
    """Return the engines that are ready, as the front end that answers sees them."""
    return set(incarnations(url))


def incarnations(url: str, ranks: Iterable[int] = ()) -> dict[int, int]:
    """Return which process each engine is that is ready, as the front end that answers sees it.

    It may be behind: wait until those of these ranks are among them.
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
    """Whether those engines are ready and other processes than before."""
    now = incarnations(url)
    return all(rank in now and now[rank] != before[rank] for rank in ranks)
