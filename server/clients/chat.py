"""`swell chat`: an interactive terminal chat."""

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from engine.shared.config import ModelConfig
from server.clients.chat_config import ChatConfig, ChatSection
from server.fleet.local_server import LocalServer, ServerFailed, serve_arguments

_MAX_LINE_BYTES = 1 << 20


class ServerRefused(Exception):
    """The server returned no answer; the message says why."""


@dataclass
class Conversation:
    """The messages of a conversation, and its system prompt."""

    system_prompt: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self, model: str, settings: ChatSection) -> dict[str, Any]:
        """Return the request body for the next answer."""
        first = [] if self.system_prompt is None else [_message("system", self.system_prompt)]
        body: dict[str, Any] = {"model": model, "messages": first + self.messages, "stream": True}
        if settings.max_tokens is not None:
            body["max_completion_tokens"] = settings.max_tokens
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return body

    def add_user(self, text: str) -> None:
        """Append a user message."""
        self.messages.append(_message("user", text))

    def answered(self, text: str) -> None:
        """Append a possibly partial answer; an empty one removes the question instead."""
        if text:
            self.messages.append(_message("assistant", text))
        elif self.messages:
            self.messages.pop()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def find_model(client: httpx.Client) -> str:
    """Return the first model that the server lists.

    Raises:
        ServerRefused: it lists none, or does not respond.
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
    """Send a request, and yield pieces of the streamed answer as (kind, text).

    Kinds are `content`, `reasoning` and, once at the end, `finish` with the reason.

    Raises:
        ServerRefused: there is no answer, or it is cut off.
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


HELP = """\
/clear          forget the conversation
/system TEXT    set the system prompt, and forget the conversation
/help           show this
/quit           leave (Ctrl-D does too)
Ctrl-C          stop the answer; leave, if none is coming"""


def chat(config: ChatConfig) -> int:
    """Run a chat until the user quits; return the exit code."""
    notes = Console(stderr=True, highlight=False)
    settings = config.chat
    try:
        with ExitStack() as stack:
            url = settings.url.rstrip("/")
            if config.model.model != ModelConfig().model:
                arguments, timeout = serve_arguments(config), config.supervisor.startup_timeout
                with notes.status("starting a server"):
                    url = stack.enter_context(LocalServer(arguments, timeout, settings.port)).url
                if not settings.quick:
                    notes.print(f"serving at {url} as well; its status page is there")
            headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
            limits = httpx.Timeout(settings.request_timeout, connect=10.0)
            client = stack.enter_context(
                httpx.Client(base_url=url, headers=headers, timeout=limits, trust_env=False)
            )
            session = _Session(client, settings, notes)
            return session.quick(settings.quick) if settings.quick else session.converse()
    except (ServerFailed, ServerRefused) as error:
        print(f"swell chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Session:
    """A chat session in one terminal."""

    def __init__(self, client: httpx.Client, settings: ChatSection, notes: Console) -> None:
        self._client = client
        self._settings = settings
        self._notes = notes
        self._conversation = Conversation(settings.system_prompt)
        self._model = settings.model_name or find_model(client)
        self._is_terminal = sys.stdin.isatty()

    def quick(self, message: str) -> int:
        """Send a single message and exit."""
        self._conversation.add_user(message)
        self._answer()
        return 0

    def converse(self) -> int:
        """Alternate user input and answers until the input ends."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() history and editing
            self._notes.print(f"Chatting with {self._model}. /help lists commands.")
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    print()
                return 0
            if line in ("/quit", "/exit", "/bye"):
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._conversation.add_user(line)
                try:
                    self._answer()
                except ServerRefused as error:
                    self._notes.print(f"[red]no answer:[/red] {error}", markup=True)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/clear":
            self._conversation.messages.clear()
        elif word == "/system":
            self._conversation = Conversation(rest.strip() or None)
        elif word == "/help":
            self._notes.print(HELP)
        else:
            self._notes.print(f"there is no {word}; /help lists commands")

    def _answer(self) -> None:
        """Stream the next answer; Ctrl-C stops it and keeps the partial text."""
        text, thinking = "", False
        pieces = stream_answer(self._client, self._conversation.body(self._model, self._settings))
        try:
            for kind, piece in pieces:
                if kind == "reasoning":
                    thinking = True
                    self._notes.print(piece, style="dim", end="", markup=False)
                elif kind == "content":
                    if thinking:
                        thinking = False
                        self._notes.print()
                    text += piece
                    print(piece, end="", flush=True)
                elif piece == "length":
                    self._notes.print(" [the limit of tokens ends it]", style="dim", markup=False)
        except KeyboardInterrupt:
            if self._settings.quick:
                raise
            self._notes.print(" [stopped]", style="dim", markup=False)
        finally:
            pieces.close()
            self._conversation.answered(text)
            print(flush=True)
