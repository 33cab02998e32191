"""Model outputs from public reports, with the expected result for any chunking."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from server.answer.call_formats import CALL_FORMATS
from server.answer.parts import Message, whole_message
from server.answer.reader import AnswerReader
from server.answer.reasoning import REASONING_FORMATS, ReasoningReader
from server.schema.tools import FunctionDefinition

HERE = Path(__file__).with_name("cases")
CASES = [
    *[(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(HERE.glob("P*.json"))],
    *[
        (f"{case['format']}: {case['report']}: {case['right']}", case)
        for case in json.loads((HERE / "reports.json").read_text("utf-8"))
    ],
]


def reader_of(case: dict[str, Any]) -> AnswerReader:
    functions = [FunctionDefinition.model_validate(tool) for tool in case.get("tools", ())]
    tags = case.get("reasoning")
    format = CALL_FORMATS[case["format"]] if "format" in case else None
    probe = None if format is None or tags is None else format.in_reasoning
    return AnswerReader(
        None if tags is None else ReasoningReader(REASONING_FORMATS[tags], inside=case["inside"]),
        None if format is None else format.parser(functions),
        calls_in_reasoning=None if probe is None else probe(functions),
    )


def read(case: dict[str, Any], pieces: list[str]) -> Message:
    reader = reader_of(case)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return whole_message([*parts, *reader.finish()])


def cuts(text: str) -> list[list[str]]:
    found = [[text], list(text)]
    for seed in range(8):
        draw = random.Random(seed)
        ends = sorted(draw.sample(range(len(text) + 1), min(len(text), 2 + 2 * seed)))
        found.append([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)])
    return found


def decoded(arguments: str) -> Any:
    """Return the arguments; truncated text is returned under a special key."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"__not_json__": arguments}


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_reported_answers_are_parsed_with_any_splitting(case: dict[str, Any]) -> None:
    expected = case["expect"]
    for pieces in cuts(case["text"]):
        found = read(case, pieces)
        calls = [[call.name, decoded(call.arguments)] for call in found.calls]
        assert calls == expected.get("calls", []), pieces
        assert (found.content or "") == expected.get("content", ""), pieces
        assert (found.reasoning or "") == expected.get("reasoning", ""), pieces
