"""Short requests that continue from the maximum that a server stores."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.hostile.operations import Ask
from server.limits import MAX_ADDED_ITEMS, MAX_MESSAGES, MAX_STORED_LENGTH

_TURN = {"role": "user", "content": ""}
_RESPONSE = {"input": "hi", "max_output_tokens": 1}
_ITEM_BYTES = 128
"""Approximate stored size of an item without text."""


class StoredCase(NamedTuple):
    """A request that refers to stored content; GET if there is no body."""

    name: str
    path: str
    body: dict[str, Any] | None = None


def stored_requests(ask: Ask) -> Iterator[StoredCase]:
    """Store content of maximum size; yield requests that refer to it."""
    for name, create in (
        ("many turns in a conversation", functools.partial(_conversation, ask, "")),
        ("long turns in a conversation", functools.partial(_conversation, ask, "a " * 50_000)),
    ):
        follow_up = {**_RESPONSE, "conversation": create()}
        yield from _asked(name, follow_up)
        yield StoredCase(
            f"{name}, listed", f"/v1/conversations/{follow_up['conversation']}/items?limit=100"
        )
    yield from _asked("many turns before", {**_RESPONSE, "previous_response_id": _chain(ask)})
    answer = ask("/v1/responses", {"input": "hi", "max_output_tokens": 200, "ignore_eos": True})
    references = [{"type": "item_reference", "id": answer["output"][0]["id"]}] * MAX_MESSAGES
    yield from _asked("one answer referred to many times", {**_RESPONSE, "input": references})


def _asked(name: str, body: dict[str, Any]) -> Iterator[StoredCase]:
    yield StoredCase(name, "/v1/responses", body)
    counted = {field: value for field, value in body.items() if field != "max_output_tokens"}
    yield StoredCase(f"{name}, counted", "/v1/responses/input_tokens", counted)


def _conversation(ask: Ask, text: str) -> str:
    """Fill a conversation with turns; return its id."""
    name: str = ask("/v1/conversations", {})["id"]
    turns = [{**_TURN, "content": text}] * MAX_ADDED_ITEMS
    number = min(MAX_MESSAGES, MAX_STORED_LENGTH // (len(text) + _ITEM_BYTES) - 1)
    for _ in range(number // MAX_ADDED_ITEMS):
        ask(f"/v1/conversations/{name}/items", {"items": turns})
    return name


def _chain(ask: Ask) -> str:
    """Create a chain of responses; return the last one's id."""
    previous: dict[str, str] = {}
    turns = [_TURN] * (MAX_MESSAGES // 8)
    for _ in range(MAX_MESSAGES // (len(turns) + 1)):  # each has an answer, too
        body = {**_RESPONSE, **previous, "input": turns, "truncation": "auto"}
        previous = {"previous_response_id": ask("/v1/responses", body)["id"]}
    return previous["previous_response_id"]
