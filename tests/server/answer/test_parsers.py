import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.shared.settings import settings_of
from server.answer.call_formats import CALL_FORMATS, JSON_LIST, CallFormat, detect
from server.answer.parts import Call, Message, Part, whole_message
from server.answer.reader import AnswerReader
from server.answer.reasoning import REASONING_FORMATS, THINK, ReasoningReader
from server.config import FrontEndConfig
from server.schema.tools import FunctionDefinition

FUNCTIONS = [
    FunctionDefinition.model_validate({"name": "add"}),
    FunctionDefinition(
        name="get_weather",
        parameters={
            "properties": {"city": {"type": "string"}, "zip": {"type": ["string", "null"]}}
        },
        strict=None,
    ),
]
CODER, GLM, HERMES, MISTRAL, PYTHONIC = (
    CALL_FORMATS[name] for name in ("qwen3_coder", "glm45", "hermes", "mistral", "pythonic")
)
HARMONY = CALL_FORMATS["openai"]

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]"}]}}'
WEATHER = '{"arguments": {"city": "São Paulo"}, "name": "get_weather"}'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}\\"]"}]}'
CALLS = [Call("add", ARGUMENTS), Call("get_weather", '{"city": "São Paulo"}')]


def read(format: CallFormat, pieces: Sequence[str], *, parallel: bool = True) -> Message:
    reader = AnswerReader(None, format.parser(FUNCTIONS), parallel=parallel)
    return whole_message([*all_parts(reader, pieces)])


def all_parts(reader: AnswerReader, pieces: Sequence[str]) -> list[Part]:
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


PLAIN = '{"name": "add", "parameters": {"a": 1}}'


NAMED = '[TOOL_CALLS]add[ARGS]{"a": "]}"}'


def coder(*parameters: str, name: str = "get_weather") -> str:
    inside = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in (each.split("=", 1) for each in parameters)
    )
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(*arguments: str, name: str = "get_weather") -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in (each.split("=", 1) for each in arguments)
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def in_block(name: str, arguments: str) -> str:
    block = f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>{block}<｜tool▁call▁end｜>"


BARE = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>"


ANSWERS: dict[str, list[tuple[str, str | None, list[Call]]]] = {
    "hermes": [
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
        ('<tool_call>{"name": "ad', None, []),
        (f"<tool_call><tool_call>{ADD}", None, CALLS[:1]),
        ("a <tool_ca", "a <tool_ca", []),
        ("if a <b and b<tool", "if a <b and b<tool", []),
    ],
    "llama3_json": [
        (PLAIN, None, [Call("add", '{"a": 1}')]),
        (f"<|python_tag|>{PLAIN}", None, [Call("add", '{"a": 1}')]),
        (f" {PLAIN}; {PLAIN}", None, [Call("add", '{"a": 1}')] * 2),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"name": "add", "age": 5}', '{"name": "add", "age": 5}', []),
        ('{"answer": [1, 2]} and more', '{"answer": [1, 2]} and more', []),
        (f"{PLAIN}; and more", "and more", [Call("add", '{"a": 1}')]),
        (f"text {PLAIN}", "text", [Call("add", '{"a": 1}')]),
        ("<|python", "<|python", []),
        ('{"name": "add", "para', None, []),
        ('{"name": "ad', '{"name": "ad', []),
        ("  ", "  ", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{ADD}, {WEATHER}]", None, CALLS),
        (f"Well. [TOOL_CALLS][{ADD}]", "Well.", CALLS[:1]),
        (NAMED, None, [Call("add", '{"a": "]}"}')]),
        (f"Well.\n{NAMED}{NAMED}", "Well.", [Call("add", '{"a": "]}"}')] * 2),
        ('[TOOL_CALLS]add{"a": 1}', None, [Call("add", '{"a": 1}')]),
        ('[TOOL_CALLS]add[ARGS]{"a": [1', None, [Call("add", '{"a": [1')]),
        ("[TOOL_CALLS] what now?", "[TOOL_CALLS] what now?", []),
        ("[TOOL_CALLS]add[AR", None, []),
        ("[TOOL_", "[TOOL_", []),
    ],
    "qwen3_coder": [
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
        ("<tool_call><function=ad", None, []),
        ("<tool_call><function=>x", "<tool_call><function=>x", []),
    ],
    "glm45": [
        (glm("city=Oslo"), None, [Call("get_weather", '{"city": "Oslo"}')]),
        (
            "Well.\n" + glm("city=5", "zip=null", "days=3", 'more=[1, "<"]') + glm(name="add"),
            "Well.",
            [
                Call("get_weather", '{"city": "5", "zip": null, "days": 3, "more": [1, "<"]}'),
                Call("add", "{}"),
            ],
        ),
        (
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>",
            None,
            [Call("add", '{"a": 1')],
        ),
        ("<tool_call>\nwhat now?", "<tool_call>\nwhat now?", []),
        ("<tool_call>ad", None, []),
        ("<tool_call>add<arg", None, []),
    ],
    "granite": [
        (f"<|tool_call|>[{ADD}, {WEATHER}]", None, CALLS),
        (f"Well.\n<tool_call> [{ADD}]", "Well.", CALLS[:1]),
        ("<|tool_call|>", None, []),
        ("<|tool_", "<|tool_", []),
        ("a < b", "a < b", []),
    ],
    "deepseek_v3": [
        (
            "Well.\n<｜tool▁calls▁begin｜>" + in_block("add", ARGUMENTS) + "\n"
            + in_block("get_weather", CALLS[1].arguments) + "<｜tool▁calls▁end｜>",
            "Well.",
            CALLS,
        ),
        (f"<｜tool▁calls▁begin｜>{BARE}{BARE}<｜tool▁calls▁end｜>", None, CALLS[:1] * 2),
        ('<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1', None, [Call("add", '{"a": 1')]),
        (
            "<｜tool▁call▁begin｜>what is this?<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>what is this?<｜tool▁call▁end｜>",
            [],
        ),
        ("<｜tool▁call▁begin｜>add<｜tool", None, []),
        ("<｜tool▁ca", "<｜tool▁ca", []),
    ],
    "pythonic": [
        (
            "[add(a=1, b=[2, {'c': '}\\\\\"]'}]), get_weather(city='São Paulo')]",
            None,
            [Call("add", ARGUMENTS.replace('\\"', '\\\\\\"')), CALLS[1]],
        ),
        ("<|python_start|>[add()]<|python_end|>", None, [Call("add", "{}")]),
        ("[add(a=True, b=None, c=-1.5)]", None, [Call("add", '{"a": true, "b": null, "c": -1.5}')]),
        ("[add(a=true)] and more", " and more", [Call("add", '{"a": true}')]),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[add(1)]", "[add(1)]", []),
        ("[add(a=open('x'))]", "[add(a=open('x'))]", []),
        ("[add(a=f'{x}')]", "[add(a=f'{x}')]", []),
        ("[add(**{'a': 1})]", "[add(**{'a': 1})]", []),
        ("[add(a=1e999)]", "[add(a=1e999)]", []),
        ("[add(a=1", None, []),
        ("[ad", "[ad", []),
        ("[add(a=1), add(a=", None, [Call("add", '{"a": 1}')]),
        ("[", "[", []),
    ],
    "internlm": [
        (f"Well.<|action_start|><|plugin|>\n{ADD}<|action_end|>", "Well.", CALLS[:1]),
    ],
}  # fmt: skip
"""Answers by format, with their expected content and calls."""


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *answer) for name, answers in ANSWERS.items() for answer in answers],
)
def test_answer_is_parsed_whole_and_by_character(
    name: str, text: str, content: str | None, calls: list[Call]
) -> None:
    for pieces in ([text], list(text)):
        assert read(CALL_FORMATS[name], pieces) == Message(None, content, calls)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_text_without_a_call_is_content(name: str) -> None:
    for pieces in (["just text"], list("just text")):
        assert read(CALL_FORMATS[name], pieces) == Message(None, "just text", [])


@pytest.mark.parametrize("depth", [50, 5_000])
def test_deeply_nested_python_call_causes_no_error(depth: int) -> None:
    text = f"[add(a={'[' * depth}{']' * depth})]"
    found = read(PYTHONIC, [text])
    assert found.content == text or json.loads(found.calls[0].arguments)["a"] == (
        [] if depth == 1 else json.loads("[" * depth + "]" * depth)
    )


def test_a_long_call_in_python_is_read_once() -> None:
    text = f"[add(a='{'x' * 60_000}')]"
    assert len(read(PYTHONIC, list(text)).calls[0].arguments) > 60_000
    endless = f"[add(a='{'x' * 70_000}"
    assert read(PYTHONIC, list(endless)).content == endless


ANALYSIS = "<|channel|>analysis<|message|>Hm.\nHm.<|end|><|start|>assistant"
TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text", Message(None, "just text", [])),
        ('{"a": 1}', Message(None, '{"a": 1}', [])),
        (
            f"{ANALYSIS}<|channel|>final<|message|>Yes < no.<|return|>",
            Message("Hm.\nHm.", "Yes < no.", []),
        ),
        (f"{ANALYSIS}{TO_ADD}<|call|>", Message("Hm.\nHm.", None, [Call("add", '{"a": 1}')])),
        (
            f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{TO_ADD}<|end|>"
            f"<|start|>assistant{TO_ADD}",
            Message(None, "Let me see.", [Call("add", '{"a": 1}')] * 2),
        ),
        (
            '<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>',
            Message(None, None, [Call("add", '{"a": 1}')]),
        ),
        ("<|channel|>final<|mess", Message(None, None, [])),
        ("<|chan", Message(None, "<|chan", [])),
    ],
)
def test_messages_in_channels_are_parsed(text: str, expected: Message) -> None:
    assert read(HARMONY, [text]) == expected
    assert read(HARMONY, list(text)) == expected


def test_half_a_surrogate_pair_stays_escaped() -> None:
    for format, text in (
        (HERMES, '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (CODER, coder('more=["\\ud800"]')),
        (GLM, glm('more=["\\ud800"]')),
        (PYTHONIC, "[add(a='\\ud800')]"),
    ):
        found = read(format, [text])
        whole = [found.content or "", *[call.name + call.arguments for call in found.calls]]
        assert "".join(whole).encode()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("<tool_call><function=name>", "qwen3_coder"),
        ('Environment: ipython {"name": x, "parameters": y}', "llama3_json"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "granite"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<｜tool▁call▁begin｜>function ```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("<|channel|>analysis<|message|>", "openai"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        (
            "Environment: ipython {'python_start': '<|python_start|>'} Respond in the format "
            '{"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3_json",
        ),
        ("<|python_start|>[now()]<|python_end|>", "pythonic"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<seed:tool_call><function=", "seed_oss"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<|START_ACTION|>", "command_r"),
        ("<tool_calls>[", "jamba"),
        ("<TOOLCALL>[", "nemotron"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini"),
        ("<function_calls>", "olmo3"),
        ("<start_function_call>call:", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<steptml:invoke name=", "step3"),
        ("make calls in a single JSON array", "xlam"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_the_format(template: str, name: str | None) -> None:
    assert detect(template) == name


def test_settings_know_every_format() -> None:
    known = {each.name: set(each.choices) for each in settings_of(FrontEndConfig)}
    assert known["tool_call_parser"] == {"auto", "none", *CALL_FORMATS}
    tagged = {"auto", "none", "tags", "openai_gptoss", *REASONING_FORMATS}
    assert known["reasoning_parser"] == tagged


def test_call_ids_fit_the_template_of_the_model() -> None:
    assert MISTRAL.new_id().isalnum()
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")


def test_arguments_are_streamed() -> None:
    reader = AnswerReader(None, HERMES.parser(FUNCTIONS))
    parts = reader.push('<tool_call>{"name": "add", "arguments": {"a": "so fa')
    assert whole_message(parts).calls == [Call("add", '{"a": "so fa')]


SNIPPETS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<tool",
    "[TOOL_CALLS]", "[ARGS]", "add", "<function=", "add>",
    "<parameter=", "a>", "</parameter>", "</function>", "\n", " ",
    "{", "}", "[", "]", '"', "\\", ":", ",", ";", '"name"', '"arguments"', '"parameters"', '"add"',
    "null", "text", ADD, PLAIN, WEATHER, "<", "(", ")", "=", "'", "a=1", "add(",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "function",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "```json",
    "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "to=functions.add",
    "[CALL_ID]", "```", "\nadd(a=1)", "[add(a=1)]", "get_weather", "\"\"\"", "print(",
    "<start_function_call>", "call:", "<escape>", "<end_function_call>", '<invoke name="add">',
    '<parameter name="city">', '<parameter=city>', "</invoke>", "<minimax:tool_call>",
    "<function=add>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "functools",
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SNIPPETS), max_size=14).map("".join)


@given(
    text=TEXTS | st.text(max_size=20),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    format=st.sampled_from([*CALL_FORMATS.values(), JSON_LIST, None]),
    reasoning=st.sampled_from([None, True, False]),
    parallel=st.booleans(),
)
def test_splitting_of_text_does_not_change_the_result(
    text: str,
    cuts: list[int],
    format: CallFormat | None,
    reasoning: bool | None,
    parallel: bool,
) -> None:
    def message(pieces: list[str]) -> Message:
        probe = None if format is None or reasoning is None else format.in_reasoning
        reader = AnswerReader(
            None if reasoning is None else ReasoningReader(THINK, inside=reasoning),
            None if format is None else format.parser(FUNCTIONS),
            calls_in_reasoning=None if probe is None else probe(FUNCTIONS),
            parallel=parallel,
        )
        return whole_message(all_parts(reader, pieces))

    pieces: list[str] = []
    start = 0
    while start < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(text[start : start + size])
        start += size
    assert message(pieces) == message([text])


@pytest.mark.slow
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    spaced=st.booleans(),
)
def test_any_arguments_are_preserved(value: object, spaced: bool) -> None:
    arguments = json.dumps({"value": value}, indent=2 if spaced else None)
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, [text]).calls == [Call("add", arguments)]
