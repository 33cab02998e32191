"""What was said so far, and one answer as it is streamed."""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.chat.config import ChatSection

_MAX_LINE_BYTES = 1 << 20


class ServerRefused(Exception):
    """The server gave no answer; the message says why."""


@dataclass
class Conversation:
    """The messages of a conversation, and the system prompt that comes before them."""

    system_prompt: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self, model: str, settings: ChatSection) -> dict[str, Any]:
        """Return the request that asks for the next answer."""
        first = [] if self.system_prompt is None else [_message("system", self.system_prompt)]
        body: dict[str, Any] = {"model": model, "messages": first + self.messages, "stream": True}
        if settings.max_tokens is not None:
            body["max_completion_tokens"] = settings.max_tokens
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return body

    def say(self, text: str) -> None:
        """The user says something."""
        self.messages.append(_message("user", text))

    def answered(self, text: str) -> None:
        """The model has answered, perhaps in part; an empty answer takes the question back."""
        if text:
            self.messages.append(_message("assistant", text))
        elif self.messages:
            self.messages.pop()

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages.clear()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def find_model(client: httpx.Client) -> str:
    """Return the first model that the server lists.

    Raises:
        ServerRefused: it lists none, or does not answer.
    """
    try:
        answer = client.get("/v1/models")
        if answer.status_code != 200:
            raise ServerRefused(_reason(answer))
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerRefused(f"{client.base_url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerRefused(f"{client.base_url} lists no models") from error


def stream_answer(client: httpx.Client, body: dict[str, Any]) -> Generator[tuple[str, str]]:
    """Ask, and yield the answer's pieces as they come: a kind and text.

    Kinds are `content`, `reasoning` and, once at the end, `finish` with the reason.

    Raises:
        ServerRefused: there is no answer, or it breaks off.
    """
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ServerRefused(_reason(answer))
            for line in answer.iter_lines():
                if len(line) > _MAX_LINE_BYTES:
                    raise ServerRefused("the server sent a line that is too long")
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _pieces(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise ServerRefused(f"the answer broke off: {error}") from error
    except ValueError as error:
        raise ServerRefused(f"the server sent what is no JSON: {error}") from error


def _pieces(chunk: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in chunk:
        raise ServerRefused(str(chunk["error"].get("message", "the server failed")))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield "reasoning", thought
        if content := delta.get("content"):
            yield "content", content
        if reason := choice.get("finish_reason"):
            yield "finish", reason


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {answer.status_code}"
