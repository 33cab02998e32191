"""Every response to arbitrary bodies conforms to the OpenAPI document and is never a 500."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.hostile.bodies import bodies
from benchmarks.hostile.operations import OPERATIONS, keep_something, named
from engine.shared.messages import UtilityResult, UtilityValue
from server.api.admin.schema import MAX_PATH_SIZE
from server.config import FrontEndConfig, GuardConfig
from server.config.answer import AnswerConfig
from server.limits import MAX_ERROR_LENGTH, MAX_JSON_DEPTH
from server.store.service import ResponseStore
from tests.server.conftest import (
    VECTOR_SIZE,
    FakeGenerationClient,
    Http,
    app_of,
    tokenizer_with,
    vectors,
)
from tests.server.endpoints import ADMIN_KEY
from tests.support.stores import sqlite_backend

HEADERS = {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"}
TEMPLATE = "{{ tools }}<tool_call>{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
ANSWER = '<think>a</think><tool_call>{"name": "f"}'
POOLING = {path: each.rights[0] for path, each in OPERATIONS.items() if each.pools}
ADAPTERS: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "law", "lora_path": "law"},
    "/v1/unload_lora_adapter": {"lora_name": "law"},
}
KINDS: dict[str, dict[str, Any]] = {
    "embeds": {"dimensions": (), "prompts": {"query": "q: "}},
    "scores": {"task": "classify", "size": 1},
    "classifies": {"task": "classify", "size": 3},
}
"""Paths of pooling models."""
SERVES = {"/classify": "classifies", "/v1/score": "scores", "/v1/rerank": "scores"}
"""The app for a path, if it is not the embedding one."""
MOST = 1 << 13
"""Maximum characters of bodies here; benchmarks/hostile sends megabytes."""

Send = Callable[[str, Iterable[str | bytes]], list[httpx.Response]]


@pytest.fixture
def config(config: FrontEndConfig) -> FrontEndConfig:
    """The configuration of an app with admin endpoints."""
    reasons = AnswerConfig(reasoning_parser="qwen3")
    return replace(config, guards=GuardConfig(admin_key=ADMIN_KEY), answer=reasons)


@pytest.fixture
def apps(
    config: FrontEndConfig,
    engines: FakeGenerationClient,
    backend: Any,
    pooling_http: Any,
    tmp_path: Path,
) -> Iterator[dict[str, FastAPI]]:
    """An app for each kind of model."""
    made = {kind: pooling_http(config, **fields).app for kind, fields in KINDS.items()}
    store = ResponseStore(sqlite_backend(tmp_path / "responses.sqlite", 1 << 24, 3600.0))
    generates = app_of(config, engines, tokenizer_with(backend, TEMPLATE), store=store)
    yield made | {"generates": generates}
    store.close()


@pytest.fixture
def kept(apps: dict[str, FastAPI], engines: FakeGenerationClient) -> dict[str, str]:
    """Ids of a response and a conversation stored by the app."""
    http = Http(apps["generates"])
    engines.script = engines.answer(ANSWER)

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = http.post(path, body).json()
        return answer

    return keep_something(ask)


@pytest.fixture
def send(apps: dict[str, FastAPI], engines: FakeGenerationClient) -> Iterator[Any]:
    """Return a function that sends bodies to a path one by one and checks the responses."""

    def to(kind: str) -> Send:
        def all_of(path: str, sent: Iterable[str | bytes]) -> list[httpx.Response]:
            script = vectors(KINDS[kind].get("size", VECTOR_SIZE)) if kind in KINDS else None
            engines.script = script or engines.answer(ANSWER)

            async def run() -> list[httpx.Response]:
                transport = httpx.ASGITransport(apps[kind], raise_app_exceptions=False)
                client = httpx.AsyncClient(transport=transport, base_url="http://swell")
                async with client:
                    return [await post(client, path, each) for each in sent]

            return asyncio.run(run())

        return all_of

    yield to
    assert all(stream.closed.is_set() for stream in engines.streams)


async def post(client: httpx.AsyncClient, path: str, body: str | bytes) -> httpx.Response:
    answer = await client.post(path, content=body, headers=HEADERS)
    assert answer.status_code in (200, 400, 404), (path, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"], (path, body)
        assert len(error["message"]) <= MAX_ERROR_LENGTH, (path, body)
    if answer.status_code == 404 and path in POOLING:
        assert error["param"] == "model", (path, body, error)
    return answer


def conforms(answer: httpx.Response, path: str, method: str, document: dict[str, Any]) -> None:
    """Check a response against the operation's entry in the document."""
    of = document["paths"][path][method]["responses"]
    assert str(answer.status_code) in of, (method, path, answer.status_code, answer.text)
    documented = of[str(answer.status_code)]
    kind = answer.headers["content-type"]
    kind = next(each for each in documented["content"] if kind.startswith(each))
    if kind == "application/json":
        schema = documented["content"][kind]["schema"]
        of_all = schema | {"components": document["components"]}
        jsonschema.Draft202012Validator(of_all).validate(answer.json())
    for name in documented.get("headers", ()):
        assert re.fullmatch(r"\d+", answer.headers.get(name, "0")), name


_document: dict[str, Any] = {}
"""The OpenAPI document of the full app, cached because creating it is slow."""


def schema_of(app: FastAPI, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if not _document:
        _document.update(app.openapi())
    content = _document["paths"][path]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema, _document


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def kind_of(path: str) -> str:
    return SERVES.get(path, "embeds") if path in POOLING else "generates"


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_every_field_handles_its_worst_values(
    apps: dict[str, FastAPI], send: Any, path: str
) -> None:
    right = (POOLING | ADAPTERS)[path]
    made = bodies(*schema_of(apps["generates"], path), [right])
    texts = [body.text for body in made if sum(map(len, body.parts)) <= MOST]
    answers = send(kind_of(path))(path, texts)
    assert {answer.status_code for answer in answers} >= {200, 400}
    assert len(texts) >= 10 * len(right)


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_incomplete_and_non_json_bodies_are_refused(send: Any, path: str) -> None:
    text = json.dumps((POOLING | ADAPTERS)[path])
    deep = MAX_JSON_DEPTH + 1
    wrong: list[str | bytes] = [
        *(text[:end] for end in range(len(text))),
        text + "}", text[:-1] + ", }", "[" + text + "]", text.replace(":", ""), "null", "\0",
        text.encode("utf-16"), text.encode()[:-2] + b"\xff" + text.encode()[-2:],
        text[:-1] + ', "other": ' + "[" * deep + "]" * deep + "}",
        text[:-1] + ', "other": ' + '{"a":' * deep + "1" + "}" * (deep + 1),
        text[:-1] + ', "other": ' + "1" * 5000,
    ]  # fmt: skip
    for answer in send(kind_of(path))(path, wrong):
        assert answer.status_code == 400, (answer.request.content, answer.text)


def test_adapter_paths_and_names_are_bounded(send: Any, engines: FakeGenerationClient) -> None:
    """The coordinator receives only accepted values, unchanged."""
    names = ["x", "\n", "é" * 60, "../x", '"', "%00", "a b", "\u202e", "tiny"]
    paths = ["/", "..", "a/../../b", "x" * MAX_PATH_SIZE, "\n", "\u0000", "a\u0000", "~", "$HOME"]
    sent = [json.dumps({"lora_name": name, "lora_path": path}) for name in names for path in paths]
    answers = send("generates")("/v1/load_lora_adapter", sent)
    taken = [json.loads(a.request.content) for a in answers if a.status_code == 200]
    assert [(each["lora_name"], each["lora_path"], False) for each in taken] == engines.changes
    assert all(name != "tiny" and "\0" not in (path or "") for name, path, _ in engines.changes)
    assert len(taken) == (len(names) - 1) * (len(paths) - 2)


WORDS = [
    "", "a", "hello", "tiny", "user", "assistant", "tool", "function", "none", "auto", "text",
    "function_call_output", "json_schema", "{}", "{", "\x00", "\ud83d", "<", "a " * 600,
]  # fmt: skip
words = st.sampled_from(WORDS)
keys = st.sampled_from(["type", "text", "name", "role", "content", "function", "$ref", "a"])
leaves = st.none() | st.booleans() | st.integers(-2, 400) | st.integers() | st.floats() | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)


SIMPLE = {
    "string": words,
    "integer": st.integers(-1, 340),
    "number": st.floats(-1, 3),
    "boolean": st.booleans(),
    "null": st.none(),
}


def fitting(schema: dict[str, Any], document: dict[str, Any], levels: int) -> Any:
    """Return a strategy for values that match a schema, or violate it from some depth on."""
    schema = resolved(schema, document)
    if variants := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*(fitting(each, document, levels) for each in variants))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if levels and "properties" in schema:
        fields = {
            name: later(field, document, levels - 1) for name, field in schema["properties"].items()
        }
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)
    if levels and "items" in schema:
        return st.lists(fitting(schema["items"], document, levels - 1), max_size=3)
    return SIMPLE.get(schema.get("type", ""), values)


def later(schema: dict[str, Any], document: dict[str, Any], levels: int) -> Any:
    """Return the same, or any value; worked out when it is drawn from."""
    return st.deferred(lambda: fitting(schema, document, levels) | values)


@pytest.mark.parametrize("path", [*OPERATIONS, *ADAPTERS])
def test_no_body_makes_the_server_fail(
    apps: dict[str, FastAPI], send: Any, kept: dict[str, str], path: str
) -> None:
    schema, document = schema_of(apps["generates"], path)
    variants = resolved(schema, document).get("anyOf", [schema])
    fields = {
        name: fitting(field, document, 3) | values
        for variant in variants
        for name, field in resolved(variant, document)["properties"].items()
    }
    few = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    rights = OPERATIONS[path].rights if path in OPERATIONS else (ADAPTERS[path],)

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(
        kind=st.sampled_from(list(KINDS) if path in POOLING else ["generates"]),
        right=st.sampled_from(rights),
        changed=st.lists(few, max_size=6),
    )
    def check(kind: str, right: dict[str, Any], changed: list[dict[str, Any]]) -> None:
        right = named(right, kept)
        right |= {"model": "tiny"} if "model" in right else {}
        sent = [json.dumps(right | each) for each in changed]
        for answer in send(kind)(path.format(**kept), sent):
            conforms(answer, path, "post", document)

    check()


def test_operations_without_body_answer_as_documented(
    whole_app: FastAPI, engines: FakeGenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(*_: object, **__: object) -> list[UtilityResult]:
        state: dict[str, UtilityValue] = {"is_paused": False, "is_sleeping": False}
        state |= {
            "directory": "/tmp",
            "trace": "/tmp/x",
            "blocks_forgotten": 1,
            "images_forgotten": 1,
        }
        return [UtilityResult(1, 0, state)]

    monkeypatch.setattr(engines, "call_utility", told)
    document, http = whole_app.openapi(), Http(whole_app)
    answered = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                continue
            parameters = operation.get("parameters", ())
            queries = [each["name"] for each in parameters if each["in"] == "query"]
            for value in ("0", "-1", "9" * 30, "abort", "\x00") if parameters else ("0",):
                at = re.sub(r"{\w+}", value.replace("\x00", "\u00e9"), path)
                query = dict.fromkeys(queries, value)
                for headers in (HEADERS, {}):
                    answer = http.request(method.upper(), at, params=query, headers=headers)
                    conforms(answer, path, method, document)
                    answered.add(answer.status_code)
    assert answered == {200, 400, 403, 404}
