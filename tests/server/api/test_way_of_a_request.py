"""No module is entered twice in one direction: in to the engines, back with a delta, at the end.

A module is entered when a function of it is called while none of its functions is running: one
whose function waits for another has not been left.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from engine.shared.messages import RequestOutput, SamplingParams
from tests.server.conftest import FakeGenerationClient, FakeStream

WAYS = ("in", "back", "last", "end")
"""To the engines; with the first delta and with the last; what a renderer has to add then."""

TWICE = {"server.access.budget", "server.access.admission", "server.access.tenants"}
"""On the way in these judge twice: by what a request says, and by the lengths of its prompts; and
admission asks whether there are several tenants, as keys may change at any time."""


class Tracer:
    """Notes which modules of the server are entered on each way."""

    def __init__(self) -> None:
        self.entered: dict[str, list[str]] = {way: [] for way in WAYS}
        self.way: str | None = None
        self._seen: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        module = _module(frame)
        if event != "call" or self.way is None or module is None or frame in self._seen:
            return
        if self.way == "last" and _ends_the_answer(frame):
            self.way = "end"
        self._seen.add(frame)  # a coroutine that goes on is called again
        if module not in [_module(caller) for caller in _callers(frame)] and not _is_plain(frame):
            self.entered[self.way].append(f"{module}:{frame.f_code.co_qualname}")


def _module(frame: FrameType) -> str | None:
    """Return the module of a call; metrics are taken along the way, they are not on it."""
    name = frame.f_globals.get("__name__", "")
    return name if name.startswith("server.") and not name.startswith("server.observe.") else None


def _ends_the_answer(frame: FrameType) -> bool:
    place = (_module(frame) or "").rpartition(".")[2], frame.f_code.co_name
    return place in (("render", "finish"), ("chunks", "end"))


def _is_plain(frame: FrameType) -> bool:
    """Whether a call only makes an object, or reads an attribute of one."""
    owner: Any = sys.modules[frame.f_globals["__name__"]]
    *path, name = frame.f_code.co_qualname.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return name == "__init__" or isinstance(getattr(owner, name, None), property)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


class TracedStream(FakeStream):
    """Two outputs of one token each; what is done between them is one way each."""

    def __init__(self, tracer: Tracer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tracer = tracer
        self._ways = iter(WAYS[1:])
        self.feed(RequestOutput(1, [104]), RequestOutput(1, [105], "length"))

    async def next(self) -> RequestOutput:
        self._tracer.way = None
        output = await super().next()
        self._tracer.way = next(self._ways)
        return output


class TracedClient(FakeGenerationClient):
    """A client whose streams say which way a request goes."""

    tracer: Tracer

    def submit(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, **_: Any
    ) -> FakeStream:
        return TracedStream(self.tracer, request_id, prompt_token_ids, sampling)


@pytest.fixture
def engines(tokenizer: Any) -> TracedClient:
    client = TracedClient(tokenizer)
    client.tracer = Tracer()
    return client


def trace(app: FastAPI, tracer: Tracer, path: str, body: dict[str, Any]) -> dict[str, list[str]]:
    """Return what is entered for a request whose body comes in one piece."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    content = msgspec.json.encode({"model": "tiny", **body})
    arriving = iter([{"type": "http.request", "body": content, "more_body": False}])
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        for message in arriving:
            return message
        return await asyncio.Future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif not message.get("more_body"):
            tracer.way = None

    async def ask() -> None:
        tracer.way = "in"
        sys.setprofile(tracer)
        try:
            await app(scope, receive, send)
        finally:
            sys.setprofile(None)

    asyncio.run(ask())
    assert statuses == [200]
    return tracer.entered


MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
PLAIN = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": [5, 6, 7]}),
    ("/v1/completions", {"prompt": "hello", "n": 1, "temperature": 0, "user": "ann"}),
    ("/v1/chat/completions", MESSAGES),
    ("/v1/chat/completions", {**MESSAGES, "response_format": {"type": "json_object"}}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/messages", {**MESSAGES, "max_tokens": 8}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), PLAIN)
def test_no_module_is_entered_twice_in_one_direction(
    app: FastAPI,
    engines: TracedClient,
    path: str,
    body: dict[str, Any],
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some request looks once in a while how fast others end: the first here, however long it takes.
    monkeypatch.setattr("server.access.admission._SAMPLE_INTERVAL", math.inf)
    trace(app, Tracer(), path, body)  # what is made once is made now
    engines.tracer = Tracer()
    entered = trace(app, engines.tracer, path, {**body, "stream": stream})
    assert all(entered.values())
    for way, calls in entered.items():
        print(way, *calls, sep="\n   ")
        times = Counter(call.partition(":")[0] for call in calls)
        twice = {module for module, count in times.items() if count > 1}
        assert not twice - (TWICE if way == "in" else set())
