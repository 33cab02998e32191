"""Operator settings apply to every endpoint that sends requests to engines."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from benchmarks.hostile.operations import OPERATIONS, keep_something, named
from server.config import FrontEndConfig, GuardConfig, TenantConfig
from server.router.generation_client import NoSuchEngine
from server.store.service import ResponseStore
from tests.server.conftest import FakeGenerationClient, Http, Script, app_of
from tests.support.stores import sqlite_backend

ANN, BOB = ({"Authorization": f"Bearer {key}"} for key in ("ann", "bob"))
KEYS = GuardConfig(api_key=("ann", "bob"))
COUNTED = {"cached_tokens", "cache_read_input_tokens"}
Ask = Callable[..., httpx.Response]
_KINDS = {
    "embed": {"/v1/embeddings", "/pooling"},
    "classify": {"/classify"},
    "score": {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"},
}
"""Paths of pooling models by task; generative models serve all other paths."""


class Everywhere:
    """Apps with the same configuration: a generative one, and one per pooling task."""

    def __init__(self, make: dict[str, Callable[[], Http]], engines: FakeGenerationClient) -> None:
        self._make, self._engines, self._text = make, engines, engines.script
        self._apps: dict[str, tuple[Http, Script]] = {}
        self._kept: dict[str, str] = {}

    def keep(self) -> None:
        """Store a response and a conversation as user ann."""

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = self._of(path)[0].post(path, body, headers=ANN).json()
            return answer

        self._kept = keep_something(ask)

    def asks(self, script: Any = None, **fields: Any) -> Iterator[tuple[str, Ask]]:
        """Yield each request that comes to an engine, and what sends it with these fields.

        Which these are is tried out: no list has to be kept.
        """
        for operation in OPERATIONS.values():
            path = operation.path.format(**self._kept)
            for right in operation.rights:
                http, own = self._of(path)
                body = named(right, self._kept)
                body |= {"model": "tiny"} if "model" in body else {}
                self._engines.script = own
                before = len(self._engines.streams)
                http.post(path, body, headers=ANN)
                if len(self._engines.streams) == before:
                    continue

                def send(
                    http: Http = http,
                    path: str = path,
                    body: dict[str, Any] = body | fields,
                    headers: dict[str, str] = ANN,
                ) -> httpx.Response:
                    del self._engines.streams[:]
                    return http.post(path, body, headers=headers)

                self._engines.script = script or own
                yield f"{path} {json.dumps(body)}", send

    def _of(self, path: str) -> tuple[Http, Script]:
        """Return the app that serves a path, and the script of its engines."""
        kind = next((kind for kind, names in _KINDS.items() if path in names), "")
        if kind not in self._apps:
            self._engines.script = self._text
            http = self._make[kind]()
            self._apps[kind] = http, self._engines.script
        return self._apps[kind]


@pytest.fixture
def everywhere(
    config: FrontEndConfig, engines: Any, tokenizer: Any, pooling_http: Any, tmp_path: Path
) -> Iterator[Callable[..., Everywhere]]:
    """Return a function that creates apps with two keys and the given tenant settings."""
    store = ResponseStore(sqlite_backend(tmp_path / "responses.sqlite", 1 << 24, 3600.0))
    text = engines.script

    def make(**tenants: Any) -> Everywhere:
        settings = replace(config, guards=KEYS, tenants=TenantConfig(**tenants))

        def generating() -> Http:
            return Http(app_of(settings, engines, tokenizer, store=store))

        engines.script = text
        kinds: dict[str, Callable[[], Http]] = {
            "": generating,
            "embed": partial(pooling_http, settings),
            "classify": partial(pooling_http, settings, task="classify"),
            "score": partial(pooling_http, settings, task="classify", size=1),
        }
        found = Everywhere(kinds, engines)
        found.keep()
        return found

    yield make
    store.close()


def response_text(answer: httpx.Response, path: str) -> str:
    """Return the field that an error names; /v1/messages has it only in the text."""
    error = answer.json()["error"]
    return str(error["message"]) if path.startswith("/v1/messages") else str(error["param"])


def test_recorded_requests_cover_all_engine_endpoints(everywhere: Any) -> None:
    paths = {name.split()[0] for name, _ in everywhere().asks()}
    assert {"/v1/completions", "/v1/chat/completions/batch", "/v1/messages", "/invocations"} < paths
    assert {"/v1/embeddings", "/pooling", "/classify", "/score", "/v2/rerank"} < paths
    assert not any("tokenize" in path or "conversations" in path for path in paths)


def test_rank_pinning_is_refused_with_keys(everywhere: Any, engines: Any) -> None:
    for name, ask in everywhere().asks():
        answer = ask(headers=ANN | {"X-data-parallel-rank": "1"})
        assert answer.status_code == 403, name
        assert "X-data-parallel-rank" in response_text(answer, name)
        assert engines.streams == [], name


def test_allowed_rank_pinning_applies_to_all_endpoints(everywhere: Any, engines: Any) -> None:
    for name, ask in everywhere(allow_rank_pinning=True).asks():
        assert ask(headers=ANN | {"X-data-parallel-rank": "1"}).status_code == 200, name
        assert {stream.pinned_rank for stream in engines.streams} == {1}, name


def test_unknown_rank_is_not_retried(everywhere: Any) -> None:
    def script(stream: Any) -> list[Exception]:
        return [NoSuchEngine("there is no engine 339")]

    for name, ask in everywhere(allow_rank_pinning=True).asks(script):
        answer = ask(headers=ANN | {"X-data-parallel-rank": "339"})
        if '"background": true' in name:  # the answer is asked for later
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400, name
        assert "X-data-parallel-rank" in response_text(answer, name)
        assert "retry-after" not in answer.headers


def test_priorities_need_the_operator_key_if_there_are_keys(everywhere: Any, engines: Any) -> None:
    for name, ask in everywhere().asks(priority=-5):
        answer = ask()
        assert answer.status_code == 400, name
        assert "priority" in response_text(answer, name)
        assert engines.streams == [], name


def test_requests_with_different_salts_share_no_cached_prompts(
    everywhere: Any, engines: Any
) -> None:
    red = {}
    for name, ask in everywhere().asks(cache_salt="red"):
        assert ask().status_code == 200, name
        red[name] = {stream.cache_root for stream in engines.streams}
    [root] = set.union(*red.values())
    assert len(root) == 16
    for name, ask in everywhere().asks(cache_salt="blue"):
        assert ask().status_code == 200, name
        assert root not in {stream.cache_root for stream in engines.streams}, name


def test_isolated_tenants_share_no_cached_prompts(everywhere: Any, engines: Any) -> None:
    """Only the owner's requests for stored objects are answered."""
    for name, ask in everywhere(prefix_cache_isolation="tenant").asks():
        roots = []
        for headers in (ANN, BOB):
            if ask(headers=headers).status_code == 200:
                roots.append({stream.cache_root for stream in engines.streams})
        assert len(roots) == 2 or "previous_response_id" in name or "conversation" in name, name
        assert all(len(each) == 1 and each != {b""} for each in roots), name
        assert roots[0] != roots[-1] or len(roots) == 1, name


def counts(value: Any) -> Iterator[int]:
    """Yield every count of cached tokens in an answer."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key in COUNTED and inner is not None else counts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from counts(inner)


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_counts_of_cached_tokens_appear_nowhere(everywhere: Any, stream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for hides in (False, True):
        shown: dict[str, int] = {}
        for name, ask in everywhere(hide_cached_tokens=hides).asks(**fields):
            text = ask().text
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            response_text = [json.loads(each) for each in (lines or [text]) if each]
            path = name.split()[0]
            shown[path] = max([shown.get(path, 0), *counts(response_text)])
        if hides:
            assert set(shown.values()) == {0}, shown
        else:
            paths = {path for path, count in shown.items() if count}
            assert {"/v1/completions", "/v1/chat/completions", "/v1/messages"} < paths
            assert {"/v1/responses", "/invocations"} <= paths
