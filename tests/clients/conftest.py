"""A front end over a scripted model, and the programs that talk to it as to any other server."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from tokenizers import AddedToken

from engine.shared.config import ModelConfig
from engine.shared.messages import RequestOutput
from server.api.services import make_services
from server.app import build_app
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.store.service import ResponseStore
from tests.server.conftest import (
    FakeGenerationClient,
    FakeStream,
    Served,
    byte_level_tokenizer,
    served,
    tokenizer_with,
)
from tests.support.stores import sqlite_backend

__all__ = ["served"]

MODEL = "scripted"
KNOWN_TO_CODEX = "gpt-5.5"
"""Another name of the model, for which Codex has settings of its own."""
ENVIRONMENT = Path(os.environ.get("SWELL_CLIENTS", Path(__file__).parents[2] / ".venv" / "clients"))
"""What `make .venv/clients/.installed` has installed."""
PROGRAMS = ENVIRONMENT / "node_modules" / ".bin"
needs_node = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
TEMPLATE = (Path(__file__).parent / "strict.jinja").read_text(encoding="utf-8")

Decide = Callable[[str], str]
"""From the text of a prompt to what the model writes."""


def call(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted:
    """Where a scripted model is served, and what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prompts: list[str] = []
        self.answers: list[str] = []
        self.requests: list[tuple[str, Any, int]] = []
        """Path, body and status of each request so far."""


class _Recorder:
    """Notes what comes in and what status it gets."""

    def __init__(self, app: FastAPI, requests: list[tuple[str, Any, int]]) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def heard() -> Message:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            if message["type"] == "http.response.start":
                body = b"".join(parts)
                path = scope["path"] + "?" + scope["query_string"].decode()
                self._requests.append(
                    (path.rstrip("?"), json.loads(body) if body else None, message["status"])
                )
            await send(message)

        await self._app(scope, heard, said)


Script = Callable[[Decide], contextlib.AbstractContextManager[Scripted]]


@pytest.fixture
def scripted(served: Served, tmp_path: Path) -> Script:
    """Return what serves a model that writes what a function of the prompt says."""

    @contextlib.contextmanager
    def serve(decide: Decide) -> Iterator[Scripted]:
        tokenizer = tokenizer_with(
            byte_level_tokenizer(),
            TEMPLATE,
            *[AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>")],
        )
        engines = FakeGenerationClient(tokenizer)
        engines.context = 1 << 20
        config = FrontEndConfig(
            model=ModelConfig(model="org/scripted", served_model_name=(MODEL, KNOWN_TO_CODEX))
        )
        store = ResponseStore(sqlite_backend(tmp_path / "responses.sqlite", 1 << 26, 3600.0))
        app = build_app(
            make_services(config, engines, tokenizer, FrontEndMetrics(config), store=store)
        )
        found = Scripted("")

        def script(stream: FakeStream) -> Any:
            prompt = tokenizer.decode(stream.prompt_token_ids, skip_special_tokens=False)
            found.prompts.append(prompt)
            found.answers.append(decide(prompt))
            outputs: list[RequestOutput] = engines.answer(found.answers[-1])(stream)  # type: ignore[assignment]
            return outputs

        engines.script = script
        with served(_Recorder(app, found.requests)) as url:
            found.url = url
            yield found
        store.close()

    return serve
