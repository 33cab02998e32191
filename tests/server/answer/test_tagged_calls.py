"""Random calls with arguments between tags, as written by models, are parsed correctly."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answer.call_formats import CALL_FORMATS
from server.answer.parts import Message, whole_message
from server.answer.reader import AnswerReader
from server.schema.tools import FunctionDefinition

TAGGED = ("qwen3_coder", "glm45")
PROPERTIES = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "number": {"type": "integer"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "flag": {"type": "boolean"},
}
FUNCTIONS = [
    FunctionDefinition(
        name=name, parameters={"type": "object", "properties": PROPERTIES}, strict=None
    )
    for name in ("find", "set.state", "a-b_c")
]

# Whatever is no tag: text between tags cannot be told from one that ends it. Hypothesis draws
# literals of our modules, too, and tags are among these.
_TAGS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
_TEXT = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=12)
_PIECES = st.sampled_from(['{"a": 1}', "12", "null", "<b>", "</", "a < b", "line\nline", "é🙂"])
_STRING = (
    st.lists(_TEXT | _PIECES, max_size=3)
    .map("".join)
    .filter(lambda text: not any(tag in text for tag in _TAGS))
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _STRING,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_STRING, inner, max_size=3),
    max_leaves=6,
)
_OF_PROPERTY: dict[str, st.SearchStrategy[Any]] = {
    "text": _STRING,
    "maybe": st.none() | _STRING.filter(lambda text: text != "null"),
    "number": st.integers(),
    "list": st.lists(_JSON, max_size=3),
    "object": st.dictionaries(_STRING, _JSON, max_size=3),
    "flag": st.booleans(),
}
_ARGUMENTS = st.fixed_dictionaries({}, optional=_OF_PROPERTY)
_CALLS = st.lists(st.tuples(st.sampled_from(FUNCTIONS), _ARGUMENTS), min_size=1, max_size=3)


def spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{spelled(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def as_glm45(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{spelled(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def read_in_pieces(name: str, text: str, cuts: list[int]) -> Message:
    reader = AnswerReader(None, CALL_FORMATS[name].parser(FUNCTIONS))
    parts = []
    start = turn = 0
    while start < len(text):
        size = cuts[turn % len(cuts)]
        parts += reader.push(text[start : start + size])
        start, turn = start + size, turn + 1
    return whole_message(parts + reader.finish())


@pytest.mark.parametrize("name", TAGGED)
@given(calls=_CALLS, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_random_tagged_calls_are_preserved(
    name: str, calls: list[tuple[FunctionDefinition, dict[str, Any]]], cuts: list[int]
) -> None:
    write = {"qwen3_coder": as_qwen3_coder, "glm45": as_glm45}[name]
    text = "Let me see.\n" + "\n".join(
        write(function.name, arguments) for function, arguments in calls
    )
    message = read_in_pieces(name, text, cuts)
    found = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert found == [(function.name, arguments) for function, arguments in calls]
    assert message.content == "Let me see."
