"""The attacks on fields cover every field of every operation."""

from typing import Any

from fastapi import FastAPI

from benchmarks.hostile.bodies import bodies
from benchmarks.hostile.operations import ADMIN_OPERATIONS, OPERATIONS, keep_something, named
from benchmarks.hostile.trial import piece
from tests.server.conftest import Http


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


def test_valid_bodies_are_accepted(whole_app: FastAPI, engines: Any) -> None:
    """An invalid field is tested with all other fields valid."""
    engines.context, http = 4096, Http(whole_app)

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = body | ({"model": "tiny"} if "model" in body else {})
        answer = http.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    kept = keep_something(ask)
    for operation in OPERATIONS.values():
        for right in () if operation.pools else operation.rights:
            ask(operation.path.format(**kept), named(right, kept))
