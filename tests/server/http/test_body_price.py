"""All fields are bounded, and no body uses more memory than a few times its size."""

import contextlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from benchmarks.hostile.operations import OPERATIONS
from server.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_MESSAGES, MAX_PARTS
from tests.server.conftest import Http
from tests.server.endpoints import ADMIN, bodies, models, numbers

ZEROS = b"0," * 10**6 + b"0"
FIELDS = ("messages", "input", "prompt", "tokens", "tools", "documents", "items", "text_2", "stop")
"""Fields that accept lists; each endpoint is tested with its own."""


@pytest.fixture
def guarded(whole_app: FastAPI) -> Callable[[str, bytes], httpx.Response]:
    """Return a function that posts bytes to an app with all features, as administrator."""
    http = Http(whole_app)
    headers = {"Content-Type": "application/json", **ADMIN}
    kept = http.request("POST", "/v1/conversations", content=b"{}", headers=headers).json()["id"]

    def post(path: str, body: bytes) -> httpx.Response:
        path = path.format(conversation_id=kept)
        return http.request("POST", path, content=body, headers=headers)

    return post


@pytest.fixture
def ask(
    guarded: Callable[[str, bytes], httpx.Response], pooling_http: Any
) -> Callable[[str, bytes], httpx.Response]:
    """Return a function that posts bytes to an app with a model that serves this path."""
    embeds, scores = pooling_http(), pooling_http(task="classify", size=1)
    headers = {"Content-Type": "application/json"}

    def post(path: str, body: bytes) -> httpx.Response:
        if path not in OPERATIONS or not OPERATIONS[path].pools:
            return guarded(path, body)
        http = embeds if path in ("/v1/embeddings", "/pooling") else scores
        answer: httpx.Response = http.request("POST", path, content=body, headers=headers)
        return answer

    return post


def unbounded(schema: Any, path: str) -> list[str]:
    """Return the paths in a core schema of strings, lists or objects without a maximum length."""
    if isinstance(schema, (list, tuple)):
        return [found for each in schema for found in unbounded(each, path)]
    if not isinstance(schema, dict):
        return []
    found = []
    kind = schema.get("type")
    if isinstance(kind, str) and kind in ("str", "list", "dict"):
        if "max_length" not in schema:
            found.append(path)
        if kind == "list" and not schema.get("fail_fast"):
            found.append(f"{path} goes on after the first error")
    inner = ((name, each) for name, each in schema.items() if name != "metadata")
    return found + [bad for name, each in inner for bad in unbounded(each, f"{path}.{name}")]


def test_every_text_list_and_object_has_a_maximum_length(whole_app: FastAPI) -> None:
    for name, model in models(whole_app).items():
        assert unbounded(model.__pydantic_core_schema__, name) == []


def test_every_number_has_a_minimum_and_a_maximum(whole_app: FastAPI) -> None:
    found = models(whole_app)
    assert {"CompletionRequest", "EmbeddingsRequest", "LoadLoraRequest", "ItemsRequest"} <= set(
        found
    )
    open_ended = [
        slot
        for name, model in found.items()
        for slot, number in numbers(model.model_json_schema(), name)
        if not {"minimum", "exclusiveMinimum"} & number.keys()
        or not {"maximum", "exclusiveMaximum"} & number.keys()
    ]
    assert open_ended == []


@contextlib.contextmanager
def peak_below(most: int, what: str) -> Iterator[None]:
    """Check that a block never allocates more than this many bytes."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{what}: {peak}"


def test_two_megabytes_of_zeros_do_not_become_a_gigabyte(
    whole_app: FastAPI, ask: Callable[[str, bytes], httpx.Response]
) -> None:
    for path, kinds in bodies(whole_app).items():
        fields = {field for kind in kinds for field in kind.model_fields if field in FIELDS}
        for field in sorted({*fields, "unknown"}):
            body = b'{"%s":[%s]}' % (field.encode(), ZEROS)
            with peak_below(4 * len(body) + 2**22, f"{path} {field}"):
                answer = ask(path, body)
            assert answer.status_code == 400, (path, field, answer.text)
            error = answer.json()["error"]
            assert error.get("code", "body_too_complex") == "body_too_complex", (path, field)


def test_validation_stops_at_the_first_wrong_element(
    whole_app: FastAPI, ask: Callable[[str, bytes], httpx.Response]
) -> None:
    for path, kinds in bodies(whole_app).items():
        lists = {field for kind in kinds for field in kind.model_fields}
        body = json.dumps(dict.fromkeys(lists, [None] * 1000)).encode()
        with peak_below(2**22 + 40 * len(body), path):
            answer = ask(path, body)
        assert answer.status_code == 400, (path, answer.text)
        assert len(answer.content) < 5000, path


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "messages"),
        ("/v1/responses", {"input": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "input"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]},
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": "n" * 2000}]},
            "messages[0].name",
        ),
    ],
)
def test_too_costly_fields_are_named(http: Any, path: str, body: Any, param: str) -> None:
    answer = http.post(path, body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").startswith(param.split("[")[0])


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    [
        ["[" * 5000],
        ['{"a":' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}"],
        ['{"a":[' + "0," * MAX_JSON_VALUES + "0]}"],
        ['{"a":[' + "0," * (MAX_JSON_VALUES // 4) + "0]}"] * 5,
    ],
    ids=["nested", "too deep", "too many", "too many in all"],
)
def test_call_arguments_are_priced_too(http: Any, arguments: list[str]) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(each) for each in arguments]}
    answer = http.post("/tokenize", {"messages": [{"role": "user", "content": "x"}, turn]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "body_too_complex"
    assert error["param"].startswith("messages[1].tool_calls[")


def test_long_conversation_is_rendered_completely(http: Any) -> None:
    parts = [{"type": "text", "text": "p"}] * MAX_PARTS
    messages = [{"role": "user", "content": "hello"}] * (MAX_MESSAGES - 1)
    messages.append({"role": "user", "content": parts})  # type: ignore[dict-item]
    answer = http.post("/tokenize", {"messages": messages})
    assert answer.status_code == 200, json.dumps(answer.json())[:500]
    assert answer.json()["count"] > MAX_MESSAGES
