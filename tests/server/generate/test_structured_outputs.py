"""What requests say about the form of their output becomes a grammar, or a 400."""

from typing import Any

import pytest

from engine.shared.messages import (
    ChoiceGrammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
    RequestOutput,
)
from server.access.limits import MAX_JSON_CONTAINERS


def grammar_of(http: Any, engines: Any, **fields: Any) -> Any:
    response = http.post("/v1/completions", {"prompt": "hello", **fields})
    assert response.status_code == 200, response.text
    return engines.streams[-1].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObjectGrammar()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}, "strict": False},
                }
            },
            JsonSchemaGrammar('{"b": 1, "a": 2}', lenient=True),
        ),
        ({"structured_outputs": {"json": "{}"}}, JsonSchemaGrammar("{}")),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            JsonSchemaGrammar("{}", ""),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            JsonObjectGrammar(" ?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, RegexGrammar("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ChoiceGrammar(("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, LarkGrammar('start: "a"')),
    ],
    ids=str,
)
def test_each_form_becomes_a_grammar(
    http: Any, engines: Any, fields: dict[str, Any], grammar: Any
) -> None:
    assert grammar_of(http, engines, **fields) == grammar


def test_a_check_is_not_repeated(http: Any, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar_of(http, engines, structured_outputs={"regex": "[a-z]{3}x"})

    def fail(*arguments: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("server.generate.grammar_check.check_grammar", fail)
    grammar_of(http, engines, structured_outputs={"regex": "[a-z]{3}x"})


def test_a_long_grammar_for_many_sequences_is_refused(http: Any, engines: Any) -> None:
    body = {"prompt": ["a"] * 300, "structured_outputs": {"regex": "a" * 100_000}}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not engines.streams


def test_what_an_engine_cannot_do_because_of_the_request_is_a_400(http: Any, engines: Any) -> None:
    """Like a regex that `allowed_token_ids` contradict: only the engine can know."""
    engines.script = lambda stream: [
        RequestOutput(
            0, [], "error", error="allowed_token_ids: nothing left", refused=True,
            error_param="allowed_token_ids",
        )
    ]  # fmt: skip
    body = {"prompt": "hello", "allowed_token_ids": [5], "structured_outputs": {"regex": "[0-9]"}}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "allowed_token_ids"
    streamed = http.post("/v1/completions", {**body, "stream": True})
    assert '"param":"allowed_token_ids"' in streamed.text


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000])
def test_a_schema_or_grammar_that_is_nested_deeply_is_a_400(http: Any, deep: str) -> None:
    for form in ({"json": deep}, {"grammar": f'start: %json {{"a": {deep}'}):
        response = http.post("/v1/completions", {"prompt": "a", "structured_outputs": form})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("structured_outputs")


def test_a_schema_that_is_sent_as_a_text_has_the_price_of_the_objects_in_it(http: Any) -> None:
    text = "[" + "{}," * MAX_JSON_CONTAINERS + "{}]"
    body = {"prompt": "a", "structured_outputs": {"json": text}}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "body_too_complex"
    assert response.json()["error"]["param"] == "structured_outputs.json"
