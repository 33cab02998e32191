"""Output format fields of requests become a grammar or a 400."""

import json
from typing import Any

import msgspec
import pytest

from engine.shared.messages import (
    ChoiceGrammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
    RequestOutput,
)
from server.config import FrontEndConfig
from server.config.answer import AnswerConfig
from server.limits import MAX_JSON_CONTAINERS
from tests.server.conftest import Http, app_of


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
        (
            {
                "structured_outputs": {
                    "json": {"properties": {"properties": {"properties": {}}, "const": {}}},
                    "disable_additional_properties": True,
                }
            },
            JsonSchemaGrammar(
                '{"properties": {"properties": {"properties": {}, "additionalProperties": false}, '
                '"const": {}}, "additionalProperties": false}'
            ),
        ),
    ],
    ids=str,
)
def test_each_output_format_becomes_a_grammar(
    http: Any, engines: Any, fields: dict[str, Any], grammar: Any
) -> None:
    assert grammar_of(http, engines, **fields) == grammar


def test_a_check_is_not_repeated(http: Any, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar_of(http, engines, structured_outputs={"regex": "[a-z]{3}x"})

    def fail(*arguments: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("server.helper_process.HelperProcess.answer", fail)
    grammar_of(http, engines, structured_outputs={"regex": "[a-z]{3}x"})


def test_a_long_grammar_for_many_sequences_is_refused(http: Any, engines: Any) -> None:
    body = {"prompt": ["a"] * 300, "structured_outputs": {"regex": "a" * 100_000}}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not engines.streams


def test_engine_refusal_of_request_is_a_400(http: Any, engines: Any) -> None:
    """For example, a regex that contradicts `allowed_token_ids`, which only the engine detects."""
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answer_in_a_dead_end_is_an_error(http: Any, engines: Any, path: str) -> None:
    """The partial output does not match the format, so it must not look like an answer."""
    reason = "nothing that fits the grammar can follow the output"
    begun = engines.answer('{"a')
    engines.script = lambda stream: [
        *[each for each in begun(stream) if each.finish_reason is None],
        RequestOutput(0, [], "error", error=reason, refused=True),
    ]
    body: dict[str, Any] = (
        {"prompt": "hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    body |= {"structured_outputs": {"json": {"type": "object"}}, "max_tokens": 50}
    whole = http.post(path, body)
    assert (whole.status_code, whole.json()["error"]["message"]) == (400, reason)
    streamed = http.post(path, {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["message"] == reason
    assert not any(choice["finish_reason"] for each in events for choice in each.get("choices", ()))


def test_grammar_without_room_in_engine_can_be_retried(http: Any, engines: Any) -> None:
    engines.script = lambda stream: [
        RequestOutput(0, [], "error", error="no room; try again later", no_room=True)
    ]
    body = {"prompt": "hello", "structured_outputs": {"regex": "[0-9]"}}
    response = http.post("/v1/completions", body)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "no room; try again later"
    assert response.json()["error"]["param"] is None
    chat = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    beams = {"prompt": "hello", "use_beam_search": True, "n": 2}
    assert http.post("/v1/completions", beams).status_code == 503
    assert http.post("/v1/chat/completions", chat | {"model": None}).status_code == 503


def test_a_structural_tag_is_read_from_either_field(http: Any, engines: Any) -> None:
    tag = {"format": {"type": "const_string", "value": "yes"}}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": tag}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **tag})}},
    ]
    grammars = [grammar_of(http, engines, **form) for form in forms]
    assert isinstance(grammars[0], LarkGrammar)
    assert '"yes"' in grammars[0].text
    assert grammars[1:] == grammars[:1] * 2


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "[1]"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": '{"format":' * 100_000}},
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "qwen_xml"}}}},
            "structured_outputs.structural_tag",
        ),
    ],
    ids=[0, 1, 2, 3, 4],
)
def test_invalid_structural_tag_is_a_400(http: Any, form: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", {"prompt": "a", **form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000])
def test_a_schema_or_grammar_that_is_nested_deeply_is_a_400(http: Any, deep: str) -> None:
    for form in ({"json": deep}, {"grammar": f'start: %json {{"a": {deep}'}):
        response = http.post("/v1/completions", {"prompt": "a", "structured_outputs": form})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("structured_outputs")


def test_schema_sent_as_text_is_priced_by_its_objects(http: Any) -> None:
    text = "[" + "{}," * MAX_JSON_CONTAINERS + "{}]"
    body = {"prompt": "a", "structured_outputs": {"json": text}}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "body_too_complex"
    assert response.json()["error"]["param"] == "structured_outputs.json"


def json_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, **more},
        }
    }


@pytest.mark.parametrize(
    "fields",
    [
        json_format(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^(?!foo).+$"}},
                "required": ["a"],
            },
            strict=False,
        ),
        json_format(
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "number"},
            }
        ),
        json_format({"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}),
    ],
    ids=["look-around of agent-native 3085", "zod's records", "firecrawl-mcp-server 196"],
)
def test_schemas_of_public_reports_are_accepted(
    http: Any, engines: Any, fields: dict[str, Any]
) -> None:
    assert isinstance(grammar_of(http, engines, **fields), JsonSchemaGrammar)


CLOSING = AnswerConfig(disable_additional_properties=True)
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def closing(engines: Any, tokenizer: Any, config: FrontEndConfig) -> Http:
    settings = msgspec.structs.replace(config, answer=CLOSING)
    return Http(app_of(settings, engines, tokenizer))


def test_server_can_close_objects_of_all_schemas(closing: Http, engines: Any) -> None:
    for fields in (json_format(OPEN), {"structured_outputs": {"json": OPEN}}):
        grammar = grammar_of(closing, engines, **fields)
        assert json.loads(grammar.schema)["additionalProperties"] is False
    said = {**OPEN, "additionalProperties": {"type": "null"}}
    grammar = grammar_of(closing, engines, **json_format(said))
    assert json.loads(grammar.schema) == said
    tool = {"type": "function", "function": {"name": "f", "parameters": OPEN}}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "tool_choice": "required",
    }
    assert closing.post("/v1/chat/completions", body).status_code == 200
    assert '"additionalProperties": false' in engines.streams[-1].sampling.grammar.text
