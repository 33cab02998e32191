import json
from collections.abc import Sequence
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answer.config import AnswerConfig
from server.answer.parts import Call, Message, Part, whole_message
from server.answer.reader import AnswerReader
from server.answer.reasoning import REASONING_FORMATS, THINK, ReasoningReader
from server.api.shared.tools import FunctionDefinition
from server.tool_calls.formats import CALL_FORMATS, JSON_LIST, CallFormat, detect

FUNCTIONS = [
    FunctionDefinition(name="add"),
    FunctionDefinition(
        name="get_weather",
        parameters={
            "properties": {"city": {"type": "string"}, "zip": {"type": ["string", "null"]}}
        },
    ),
]
CODER, MISTRAL = CALL_FORMATS["qwen3_coder"], CALL_FORMATS["mistral"]
HERMES, LLAMA = CALL_FORMATS["hermes"], CALL_FORMATS["llama3_json"]

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]"}]}}'
WEATHER = '{"arguments": {"city": "São Paulo"}, "name": "get_weather"}'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}\\"]"}]}'
CALLS = [Call("add", ARGUMENTS), Call("get_weather", '{"city": "São Paulo"}')]


def read(format: CallFormat, pieces: Sequence[str], **options: bool) -> Message:
    reader = AnswerReader(None, format.parser(FUNCTIONS), **options)
    return whole_message([*all_parts(reader, pieces)])


def all_parts(reader: AnswerReader, pieces: Sequence[str]) -> list[Part]:
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        (" text \n", " text \n", []),
        (f"<tool_call>\n{ADD}\n</tool_call>", None, CALLS[:1]),
        (
            f"Let me see.\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
            "Let me see.",
            CALLS,
        ),
        (f"<tool_call>\n{ADD}\n<tool_call>\n{WEATHER}", None, CALLS),
        (f"<tool_call>{ADD}</tool_call> done ", " done", CALLS[:1]),
        ('<tool_call>{"name": "add"}</tool_call>', None, [Call("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": null}', None, [Call("add", "{}")]),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            None,
            [Call("add", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', None, [Call("add", '{"a": 1')]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>',
            None,
            [Call("add", '{"a": 1}')],
        ),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        ('<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', []),
        ('<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
        (f"<tool_call><tool_call>{ADD}", "<tool_call>", CALLS[:1]),
        ("a <tool_ca", "a <tool_ca", []),
        ("if a <b and b<tool", "if a <b and b<tool", []),
    ],
)
def test_calls_between_tags(text: str, content: str | None, calls: list[Call]) -> None:
    assert read(HERMES, [text]) == Message(None, content, calls)
    assert read(HERMES, list(text)) == Message(None, content, calls)


PLAIN = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        (PLAIN, None, [Call("add", '{"a": 1}')]),
        (f"<|python_tag|>{PLAIN}", None, [Call("add", '{"a": 1}')]),
        (f" {PLAIN}; {PLAIN}", None, [Call("add", '{"a": 1}')] * 2),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "add", "age": 5}', '{"name": "add", "age": 5}', []),
        ('{"answer": [1, 2]} and more', '{"answer": [1, 2]} and more', []),
        (f"{PLAIN}; and more", "and more", [Call("add", '{"a": 1}')]),
        (f"text {PLAIN}", f"text {PLAIN}", []),
        ("<|python", "<|python", []),
        ('{"name": "add", "para', '{"name": "add", "para', []),
        ("  ", "  ", []),
    ],
)
def test_bare_calls(text: str, content: str | None, calls: list[Call]) -> None:
    assert read(LLAMA, [text]) == Message(None, content, calls)
    assert read(LLAMA, list(text)) == Message(None, content, calls)


NAMED = '[TOOL_CALLS]add[ARGS]{"a": "]}"}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        (f"[TOOL_CALLS] [{ADD}, {WEATHER}]", None, CALLS),
        (f"Well. [TOOL_CALLS][{ADD}]", "Well.", CALLS[:1]),
        (NAMED, None, [Call("add", '{"a": "]}"}')]),
        (f"Well.\n{NAMED}{NAMED}", "Well.", [Call("add", '{"a": "]}"}')] * 2),
        ('[TOOL_CALLS]add{"a": 1}', None, [Call("add", '{"a": 1}')]),
        ('[TOOL_CALLS]add[ARGS]{"a": [1', None, [Call("add", '{"a": [1')]),
        ("[TOOL_CALLS] what now?", "[TOOL_CALLS] what now?", []),
        ("[TOOL_CALLS]add[AR", "[TOOL_CALLS]add[AR", []),
        ("[TOOL_", "[TOOL_", []),
    ],
)
def test_calls_behind_a_marker(text: str, content: str | None, calls: list[Call]) -> None:
    assert read(MISTRAL, [text]) == Message(None, content, calls)
    assert read(MISTRAL, list(text)) == Message(None, content, calls)


def coder(*parameters: str, name: str = "get_weather") -> str:
    inside = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in (each.split("=", 1) for each in parameters)
    )
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        (coder("city=Oslo"), None, [Call("get_weather", '{"city": "Oslo"}')]),
        (
            "Well.\n" + coder("city=5", "zip=null", "days=3", 'more=[1, "<"]', "rest=NaN"),
            "Well.",
            [
                Call(
                    "get_weather",
                    '{"city": "5", "zip": null, "days": 3, "more": [1, "<"], "rest": "NaN"}',
                )
            ],
        ),
        (coder(name="add") + coder(name="now"), None, [Call("add", "{}"), Call("now", "{}")]),
        (coder("city=two\nlines\n"), None, [Call("get_weather", '{"city": "two\\nlines\\n"}')]),
        (
            "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</function>",
            None,
            [Call("add", '{"a": 1, "b": 2}')],
        ),
        ("<tool_call><function=add><parameter=a>1", None, [Call("add", "{")]),
        ("<tool_call>\nwhat?", "<tool_call>\nwhat?", []),
        ("<tool_call><function=ad", "<tool_call><function=ad", []),
        ("<tool_call><function=>x", "<tool_call><function=>x", []),
    ],
)  # fmt: skip
def test_parameters_between_tags(text: str, content: str | None, calls: list[Call]) -> None:
    assert read(CODER, [text]) == Message(None, content, calls)
    assert read(CODER, list(text)) == Message(None, content, calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("<tool_call><function=name>", "qwen3_coder"),
        ('Environment: ipython {"name": x, "parameters": y}', "llama3_json"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_the_format(template: str, name: str | None) -> None:
    assert detect(template) is (None if name is None else CALL_FORMATS[name])


def test_settings_know_every_format() -> None:
    names = get_args(get_type_hints(AnswerConfig)["tool_call_parser"])
    assert set(names) == {"auto", "none", *CALL_FORMATS}
    names = get_args(get_args(get_type_hints(AnswerConfig)["reasoning_parser"])[0])
    assert set(names) == {"auto", "tags", *REASONING_FORMATS}


def test_names_of_calls_suit_the_models_templates() -> None:
    assert MISTRAL.new_id().isalnum()
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")


def test_a_list_of_calls() -> None:
    text = f"[{PLAIN}, {WEATHER}]"
    expected = [Call("add", '{"a": 1}'), CALLS[1]]
    assert read(JSON_LIST, [text]) == Message(None, None, expected)
    assert read(JSON_LIST, list(text)) == Message(None, None, expected)


def test_of_parallel_calls_only_the_first_can_be_shown() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>"
    assert read(HERMES, [text], parallel=False).calls == CALLS[:1]


def test_a_name_comes_before_its_arguments_and_once() -> None:
    parts = all_parts(AnswerReader(None, HERMES.parser(FUNCTIONS)), list(f"<tool_call>{WEATHER}"))
    kinds = [type(part).__name__ for part in parts]
    assert kinds[0] == "CallBegin"
    assert set(kinds[1:]) == {"CallArguments"}


def test_arguments_come_while_they_are_written() -> None:
    reader = AnswerReader(None, HERMES.parser(FUNCTIONS))
    parts = reader.push('<tool_call>{"name": "add", "arguments": {"a": "so fa')
    assert whole_message(parts).calls == [Call("add", '{"a": "so fa')]


SNIPPETS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<tool",
    "[TOOL_CALLS]", "[ARGS]", "add", "<function=", "add>",
    "<parameter=", "a>", "</parameter>", "</function>", "\n", " ",
    "{", "}", "[", "]", '"', "\\", ":", ",", ";", '"name"', '"arguments"', '"parameters"', '"add"',
    "null", "text", ADD, PLAIN, WEATHER, "<",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SNIPPETS), max_size=14).map("".join)


@given(
    text=TEXTS | st.text(max_size=20),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    format=st.sampled_from([HERMES, LLAMA, CODER, MISTRAL, JSON_LIST, None]),
    reasoning=st.sampled_from([None, True, False]),
    parallel=st.booleans(),
)
def test_how_the_text_is_cut_changes_nothing(
    text: str,
    cuts: list[int],
    format: CallFormat | None,
    reasoning: bool | None,
    parallel: bool,
) -> None:
    def message(pieces: list[str]) -> Message:
        reader = AnswerReader(
            None if reasoning is None else ReasoningReader(THINK, inside=reasoning),
            None if format is None else format.parser(FUNCTIONS),
            parallel=parallel,
        )
        return whole_message(all_parts(reader, pieces))

    pieces, start = [], 0
    while start < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(text[start : start + size])
        start += size
    assert message(pieces) == message([text])


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    spaced=st.booleans(),
)
def test_any_arguments_come_through(value: object, spaced: bool) -> None:
    arguments = json.dumps({"value": value}, indent=2 if spaced else None)
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, [text]).calls == [Call("add", arguments)]
