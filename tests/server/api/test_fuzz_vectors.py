"""Whatever is sent for vectors, scores and adapters is answered, and never with a 500."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.hostile.bodies import bodies
from benchmarks.hostile.operations import OPERATIONS
from server.api.admin.schema import MAX_PATH_SIZE
from server.api.services import make_services
from server.app import build_app
from server.config import FrontEndConfig, GuardConfig
from server.limits import MAX_ERROR_LENGTH, MAX_JSON_DEPTH
from server.observe.metrics import FrontEndMetrics
from tests.server.conftest import VECTOR_SIZE, FakeGenerationClient, vectors

KEY = "open"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
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
"""Of models that make vectors."""
SERVES = {"/classify": "classifies", "/v1/score": "scores", "/v1/rerank": "scores"}
"""Which of them a path is asked at, if not the one that embeds."""
MOST = 1 << 13
"""Characters of the bodies that are sent here; benchmarks/hostile sends the megabytes."""

Send = Callable[[str, Iterable[str | bytes]], list[httpx.Response]]


@pytest.fixture
def config(config: FrontEndConfig) -> FrontEndConfig:
    """The configuration of an app that has the endpoints of administrators."""
    return replace(config, guards=GuardConfig(admin_key=KEY))


@pytest.fixture
def apps(
    config: FrontEndConfig, engines: FakeGenerationClient, tokenizer: Any, pooling_http: Any
) -> dict[str, FastAPI]:
    """An app for each kind of model."""
    made = {kind: pooling_http(config, **fields)._app for kind, fields in KINDS.items()}
    return made | {
        "generates": build_app(make_services(config, engines, tokenizer, FrontEndMetrics(config)))
    }


@pytest.fixture
def send(apps: dict[str, FastAPI], engines: FakeGenerationClient) -> Iterator[Any]:
    """Return what sends bodies to a path of an app, one after the other, and checks the answers."""

    def to(kind: str) -> Send:
        def all_of(path: str, sent: Iterable[str | bytes]) -> list[httpx.Response]:
            engines.script = vectors(KINDS.get(kind, {}).get("size", VECTOR_SIZE))

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
    if answer.status_code == 404:
        assert error["param"] == "model", (path, body, error)
    return answer


_document: dict[str, Any] = {}
"""What all apps here say of themselves: it takes longer to make than most tests."""


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


def unbounded(schema: dict[str, Any], document: dict[str, Any], where: str) -> Iterator[str]:
    """Yield each text, list and number of a body that has no bound."""
    schema = resolved(schema, document)
    for variant in schema.get("anyOf", ()):
        yield from unbounded(variant, document, where)
    for name, field in schema.get("properties", {}).items():
        yield from unbounded(field, document, f"{where}.{name}")
    if "items" in schema:
        yield from unbounded(schema["items"], document, f"{where}[]")
    bounds = {
        "string": ("maxLength",),
        "array": ("maxItems",),
        "integer": ("minimum", "maximum"),
        "number": ("minimum", "maximum"),
    }
    if "enum" not in schema and "const" not in schema:
        for bound in bounds.get(schema.get("type", ""), ()):
            if bound not in schema:
                yield f"{where}: {bound}"


def kind_of(path: str) -> str:
    return SERVES.get(path, "embeds") if path in POOLING else "generates"


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_every_text_list_and_number_has_a_bound(apps: dict[str, FastAPI], path: str) -> None:
    schema, document = schema_of(apps["embeds"], path)
    assert list(unbounded(schema, document, path)) == []


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_every_field_takes_or_refuses_its_worst_values(
    apps: dict[str, FastAPI], send: Any, path: str
) -> None:
    right = (POOLING | ADAPTERS)[path]
    made = bodies(*schema_of(apps["embeds"], path), [right])
    texts = [body.text for body in made if sum(map(len, body.parts)) <= MOST]
    answers = send(kind_of(path))(path, texts)
    assert {answer.status_code for answer in answers} >= {200, 400}
    assert len(texts) >= 10 * len(right)


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_a_body_that_is_not_whole_or_no_json_is_refused(send: Any, path: str) -> None:
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


def test_paths_and_names_of_adapters_at_their_bounds(
    send: Any, engines: FakeGenerationClient
) -> None:
    """Only what was taken comes to the coordinator, and as it was sent."""
    names = ["x", "\n", "é" * 60, "../x", '"', "%00", "a b", "\u202e", "tiny"]
    paths = ["/", "..", "a/../../b", "x" * MAX_PATH_SIZE, "\n", "\u0000", "a\u0000", "~", "$HOME"]
    sent = [json.dumps({"lora_name": name, "lora_path": path}) for name in names for path in paths]
    answers = send("generates")("/v1/load_lora_adapter", sent)
    taken = [json.loads(a.request.content) for a in answers if a.status_code == 200]
    assert [(each["lora_name"], each["lora_path"], False) for each in taken] == engines.changes
    assert all(name != "tiny" and "\0" not in (path or "") for name, path, _ in engines.changes)
    assert len(taken) == (len(names) - 1) * (len(paths) - 2)


words = st.sampled_from(
    ["", "a", "hello", "tiny", "query", "base64", "float", "embed", "classify", "left",
     "token_embed", "\x00", "\ud83d", "a " * 600]
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-2, 400) | st.integers() | st.floats() | words
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["text", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)
inputs = (
    words
    | st.lists(words, max_size=3)
    | st.lists(st.integers(-1, 340), max_size=4)
    | st.lists(st.lists(st.integers(0, 335), max_size=3), max_size=3)
    | st.lists(st.fixed_dictionaries({"text": words}), max_size=3)
)


@pytest.mark.parametrize("path", [*POOLING, *ADAPTERS])
def test_no_body_makes_the_server_fail(apps: dict[str, FastAPI], send: Any, path: str) -> None:
    schema = resolved(*schema_of(apps["embeds"], path))
    names = sorted(schema["properties"])
    right = (POOLING | ADAPTERS)[path]
    kinds = list(KINDS) if path in POOLING else ["generates"]

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        kind=st.sampled_from(kinds),
        fields=st.lists(
            st.dictionaries(st.sampled_from(names), values | inputs, max_size=4), max_size=6
        ),
    )
    def check(kind: str, fields: list[dict[str, Any]]) -> None:
        send(kind)(path, [json.dumps(right | each) for each in fields])

    check()
