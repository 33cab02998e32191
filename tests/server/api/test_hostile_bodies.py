"""The attacks on fields cover every field of every operation."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from benchmarks.hostile.bodies import bodies
from benchmarks.hostile.operations import ADMIN_OPERATIONS, OPERATIONS, keep_something, named
from benchmarks.hostile.trial import piece
from server.api.services import make_services
from server.app import build_app
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.store.service import ResponseStore
from tests.support.stores import sqlite_backend


@pytest.fixture
def app(config: FrontEndConfig, engines: Any, tokenizer: Any, tmp_path: Path) -> Iterator[FastAPI]:
    engines.context = 4096
    store = ResponseStore(sqlite_backend(tmp_path / "responses.sqlite", 1 << 24, 3600.0))
    yield build_app(make_services(config, engines, tokenizer, FrontEndMetrics(config), store=store))
    store.close()


def fields_of(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    variants = [fields_of(each, document) for each in schema.get("anyOf", ())]
    return set(schema.get("properties", ())).union(*variants)


def test_every_field_of_every_operation_is_attacked(whole_app: FastAPI) -> None:
    document = whole_app.openapi()
    operations = OPERATIONS | ADMIN_OPERATIONS
    with_bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operations in document["paths"].items()
        if "requestBody" in operations.get("post", ())
    }
    assert with_bodies.keys() == operations.keys(), "benchmarks/hostile/operations.py lists them"
    for path, schema in with_bodies.items():
        names = [body.name for body in bodies(schema, document, operations[path].rights)]
        for field in fields_of(schema, document):
            assert any(name.startswith(field) for name in names), f"{path}: {field}"
        if path == "/v1/messages":
            deepest = "messages[].content[].content[].source.data: "
            assert any(name.startswith(deepest) for name in names), "an image in a tool's result"


def test_attack_parts_cover_all_attacks() -> None:
    parts = [[*piece(range(10), (which, 3))] for which in (1, 2, 3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [*piece(range(10), (1, 1))] == [*range(10)]


@pytest.mark.slow  # it opens a socket
def test_valid_bodies_are_accepted(app: FastAPI, served: Any) -> None:
    """An invalid field is tested with all other fields valid."""
    with served(app) as url:

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            body = body | ({"model": "tiny"} if "model" in body else {})
            headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
            asked = urllib.request.Request(url + path, msgspec.json.encode(body), headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                found: dict[str, Any] = msgspec.json.decode(answer.read())
            return found

        kept = keep_something(ask)
        for operation in OPERATIONS.values():
            for right in () if operation.pools else operation.rights:
                ask(operation.path.format(**kept), named(right, kept))
