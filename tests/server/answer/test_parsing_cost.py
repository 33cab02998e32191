"""The cost of parsing an answer is linear in its length, whatever a model writes.

What is held back is counted: text that is put together anew with every piece that comes is copied
and searched again each time, so that work grows with the square of the answer's length.
"""

from collections.abc import Iterator

import pytest

from server.answer.call_formats import CALL_FORMATS, CallFormat, CallSyntax
from server.answer.parts import AnswerParser, Part, whole_message
from server.answer.reader import AnswerReader
from server.answer.reasoning import REASONING_FORMATS, THINK, ReasoningReader, ReasoningTags
from server.schema.tools import FunctionDefinition
from server.text.markers import MAX_HEAD

LENGTH, PIECE = 4000, 12
MOST = MAX_HEAD**2 // PIECE + 20 * LENGTH
"""Characters put together anew: heads are looked at with each piece, all else a few times. Reading
everything with each piece would take six times as many."""

_JSON = ('{"name": "', '{"x": "', '{"name": "add", "arguments": {"a": "')
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
BEGUN = {
    "deepseek_v3": [
        _DEEPSEEK_CALL,
        _DEEPSEEK_CALL + "function<｜tool▁sep｜>add",
        _DEEPSEEK_CALL + 'add<｜tool▁sep｜>{"a": "',
    ],
    "deepseek_v32": [
        "<｜DSML｜function_calls>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="add"><｜DSML｜parameter name="a">',
    ],
    "functiongemma": [
        "<start_function_call>", "<start_function_call>call:add{",
        "<start_function_call>call:add{a:<escape>",
    ],
    "glm45": [
        "<tool_call>", "<tool_call>add", "<tool_call>add<arg_key>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>",
    ],
    "granite": ["<|tool_call|>[", *(f"<|tool_call|>[{each}" for each in _JSON)],
    "hermes": ["<tool_call>", *(f"<tool_call>{each}" for each in _JSON)],
    "kimi_k2": [
        "<|tool_call_begin|>", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
    ],
    "openai": [
        "<|channel|>", "<|start|>", "<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.add<|message|>",
    ],
    "qwen3_coder": [
        "<tool_call>", "<tool_call><function=", "<tool_call><function=add>",
        "<tool_call><function=add><parameter=", "<tool_call><function=add><parameter=a>",
    ],
    "llama3_json": ["<|python_tag|>", *_JSON],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]add[ARGS]{", "[TOOL_CALLS][" + _JSON[0]],
    "pythonic": ["[", "[add(a=1)", "[add(a=1), ", "[add(", "[add(a='"],
}  # fmt: skip
"""The beginnings of calls, at various stages."""
SAME = {
    "gemma4": "functiongemma",
    "lfm2": "pythonic",
    "minimax_m2": "qwen3_coder",
    "olmo3": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "qwen3_coder",
    "step3": "qwen3_coder",
}
"""Formats without a syntax that share the parser of another one."""


def enforced_beginnings(format: CallFormat, syntax: CallSyntax) -> list[str]:
    """Return the beginnings of a call that the syntax of a format enforces."""
    before = syntax.opening + syntax.before
    begun = before.replace("{name}", '"add"').replace("{bare_name}", "add")
    return [*format.starts, begun, begun + '{"a": "']


BEGUN |= {
    name: enforced_beginnings(format, format.syntax)
    for name, format in CALL_FORMATS.items()
    if format.syntax is not None and name not in BEGUN | SAME
}
FILLERS = (" ", "a", "{", '"')


def texts(owner: object) -> Iterator[str]:
    """Yield all strings held by an object and its attributes, recursively."""
    names = getattr(type(owner), "__slots__", ()) or vars(owner)
    for value in [getattr(owner, name) for name in names]:
        if isinstance(value, str):
            yield value
        elif type(value).__module__.startswith("server."):
            yield from texts(value)


def work(reader: AnswerReader, text: str) -> int:
    """Return the number of characters copied while a text is read in small pieces."""
    known: set[int] = set()
    total = 0
    for start in range(0, len(text), PIECE):
        reader.push(text[start : start + PIECE])
        held = {id(each): len(each) for each in texts(reader)}
        total += sum(size for name, size in held.items() if name not in known)
        known = set(held)
    reader.finish()
    return total


def test_cost_tests_cover_all_formats() -> None:
    assert BEGUN.keys() | SAME.keys() == CALL_FORMATS.keys()


@pytest.mark.parametrize("name", BEGUN)
@pytest.mark.parametrize("filler", FILLERS)
def test_a_parser_of_calls_reads_each_piece_once(name: str, filler: str) -> None:
    functions = [FunctionDefinition.model_validate({"name": "add"})]
    for begun in ("", *BEGUN[name]):
        reader = AnswerReader(None, CALL_FORMATS[name].parser(functions))
        assert work(reader, begun + filler * LENGTH) <= MOST, begun


@pytest.mark.parametrize("tags", {each.start: each for each in REASONING_FORMATS.values()}.values())
@pytest.mark.parametrize("filler", ["\n", "a", "<"])
def test_reasoning_is_read_once(tags: ReasoningTags, filler: str) -> None:
    for begun in ("", tags.start, tags.start + "a", tags.start + tags.end):
        reader = AnswerReader(ReasoningReader(tags, inside=tags.implied), None)
        assert work(reader, begun + filler * LENGTH) <= MOST, begun


def test_a_header_that_does_not_end_is_content() -> None:
    reader = AnswerReader(None, CALL_FORMATS["openai"].parser([]))
    text = "<|start|>" + "a" * 2 * MAX_HEAD
    pieces = [text[start : start + 100] for start in range(0, len(text), 100)]
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert whole_message(parts).content == text


@pytest.mark.parametrize("name", BEGUN)
def test_parsing_cost_is_the_same_for_whole_and_pieces(name: str) -> None:
    """Parsers rescan the rest after each tag, so they must receive small pieces."""
    given: list[int] = []

    class Recorder:
        def __init__(self, parser: AnswerParser) -> None:
            self._parser = parser

        def push(self, text: str) -> list[Part]:
            given.append(len(text))
            return self._parser.push(text)

        def finish(self) -> list[Part]:
            return self._parser.finish()

    functions = [FunctionDefinition.model_validate({"name": "add"})]
    text = "".join(BEGUN[name]) * 400
    whole = AnswerReader(None, Recorder(CALL_FORMATS[name].parser(functions)))
    parts = whole.push(text) + whole.finish()
    assert max(given) <= 512
    assert sum(given) == len(text)
    pieces = AnswerReader(None, CALL_FORMATS[name].parser(functions))
    cut = [
        part for start in range(0, len(text), 3) for part in pieces.push(text[start : start + 3])
    ]
    assert whole_message(parts) == whole_message(cut + pieces.finish())


def test_calls_in_reasoning_are_read_once() -> None:
    functions = [FunctionDefinition.model_validate({"name": "add"})]
    for name, begun in BEGUN.items():
        format = CALL_FORMATS[name]
        if format.in_reasoning is None:
            continue
        for begin in ("", *begun):
            reader = AnswerReader(
                ReasoningReader(THINK, inside=True),
                format.parser(functions),
                calls_in_reasoning=format.in_reasoning(functions),
            )
            assert work(reader, begin + "a" * LENGTH) <= 2 * MOST, (name, begin)
