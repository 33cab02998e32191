"""The table of request fields holds against the running application."""

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.write_compatibility_doc import TARGET, render
from server.api.compatibility import TABLE, Row
from server.api.refusals import REQUESTS

MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, **MESSAGES},
    "/v1/messages/count_tokens": {"model": "tiny", **MESSAGES},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}


def rows(path: str, state: str) -> Iterator[tuple[str, Row]]:
    return ((name, row) for name, row in TABLE[path].items() if row.state == state)


def test_every_field_of_a_schema_has_its_row() -> None:
    for model, fields in REQUESTS.items():
        known = {field.alias or name for name, field in model.model_fields.items()}
        assert known <= fields.keys(), model
        assert {name for name, row in fields.items() if row.state in ("same", "different")} <= known


def test_every_row_but_of_what_is_the_same_has_its_reason() -> None:
    for fields in TABLE.values():
        for name, row in fields.items():
            assert bool(row.why) == (row.state != "same"), name


@pytest.mark.parametrize("path", TABLE)
def test_what_is_refused_is_refused_by_its_name(http: Any, path: str) -> None:
    for name, row in rows(path, "refused"):
        answer = http.post(path, {**BODIES[path], name: row.example})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert error.get("param", name) == name, "Anthropic's clients know no params"
        assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("path", TABLE)
def test_what_asks_for_nothing_is_taken(http: Any, path: str) -> None:
    for name, row in (*rows(path, "refused"), *rows(path, "ignored")):
        for neutral in (None, *row.neutral):
            answer = http.post(path, {**BODIES[path], name: neutral})
            assert answer.status_code == 200, (name, neutral)


def test_a_refused_field_is_found_however_its_name_is_spelled(http: Any) -> None:
    body = b'{"prompt": "hello", "logprob\\u005ftoken_ids": true}'
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.json()["error"]["param"] == "logprob_token_ids"


def test_one_is_not_true(http: Any) -> None:
    body = {**BODIES["/v1/completions"], "length_penalty": True}
    assert http.post("/v1/completions", body).status_code == 400


def test_fields_that_nobody_has_heard_of_are_ignored(http: Any) -> None:
    for path, body in BODIES.items():
        assert http.post(path, {**body, "unheard_of": {"of": [1]}}).status_code == 200


def test_the_last_of_several_values_counts(http: Any) -> None:
    body = b'{"prompt": "hello", "logprob_token_ids": false, "logprob_token_ids": true}'
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400


def test_the_page_is_what_the_table_says() -> None:
    assert TARGET.read_text(encoding="utf-8") == render()
