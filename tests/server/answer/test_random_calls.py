"""Random output under a tool call's grammar is always a call that matches its schema."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.masks import GrammarTable
from engine.shared.messages import GrammarSpec
from server.answer.call_formats import CALL_FORMATS, JSON_LIST, CallFormat
from server.answer.parts import Message, whole_message
from server.answer.reader import AnswerReader
from server.answer.tool_choice import CallsGrammar
from server.schema.tools import FunctionDefinition
from tests.support.drawing import bundled_table, write

ENFORCED = {
    name: format
    for name, format in {**CALL_FORMATS, "json list": JSON_LIST}.items()
    if format.syntax is not None
}
DEAD_END = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "patternProperties": {"^score$": {}},
    "required": ["score"],
    "additionalProperties": False,
}
"""A comma after the only property is a dead end, unless it is excluded in advance."""

_VALUES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "string", "maxLength": 5},
        {"enum": ["a b", 'c"', 7, None]},
        {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    ]
)


def _parameters(
    properties: dict[str, Any], pattern: str | None, num_required: int
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:num_required],
        "additionalProperties": False,
    }
    return schema if pattern is None else {**schema, "patternProperties": {pattern: {}}}


_PARAMETERS = st.builds(
    _parameters,
    st.dictionaries(st.sampled_from(["a", "b", "score"]), _VALUES, max_size=3),
    st.sampled_from([None, "^a$", "^(score|a)$", "^[ab]$", "^z1?$"]),
    st.integers(0, 3),
)


@pytest.fixture(scope="module")
def table() -> Iterator[GrammarTable]:
    with bundled_table() as made:
        yield made


def read(format: CallFormat, functions: list[FunctionDefinition], text: str) -> Message:
    reader = AnswerReader(None, format.parser(functions))
    return whole_message(reader.push(text) + reader.finish())


def forced(functions: list[FunctionDefinition], format: CallFormat) -> GrammarSpec:
    return CallsGrammar(functions, format, parallel=False, is_special=lambda text: False).calls()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENFORCED)
def test_random_calls_fit_random_schemas(table: GrammarTable, name: str) -> None:
    format = ENFORCED[name]

    @settings(max_examples=15)
    @given(_PARAMETERS, st.integers(0, 99))
    def check(parameters: dict[str, Any], seed: int) -> None:
        functions = [FunctionDefinition(name="f", parameters=parameters, strict=True)]
        text = write(table, forced(functions, format), random.Random(seed))
        (call,) = read(format, functions, text).calls
        assert call.name == "f"
        jsonschema.validate(json.loads(call.arguments), parameters)

    check()


@pytest.mark.parametrize("name", ENFORCED)
def test_strict_tool_arguments_reach_no_dead_end(table: GrammarTable, name: str) -> None:
    format = ENFORCED[name]
    functions = [FunctionDefinition(name="f", parameters=DEAD_END, strict=True)]
    for seed in range(6):
        text = write(table, forced(functions, format), random.Random(seed))
        (call,) = read(format, functions, text).calls
        jsonschema.validate(json.loads(call.arguments), DEAD_END)
