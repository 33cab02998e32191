"""Structural tags: the texts that their grammars allow."""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.masks import GrammarTable
from engine.shared.grammar_spec import (
    BadGrammar,
    check_grammar,
    grammar_text,
)
from engine.shared.matchers import byte_tokenizer, new_matcher
from engine.shared.messages import LarkGrammar
from server.generate.structural_tags import StructuralTag, lark_from_tag
from tests.support.cpu_time import takes_less_than
from tests.support.drawing import bundled_table, write

SPECIAL = ("<|call|>", "<|end_call|>")
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WORD = {"type": "regex", "pattern": "[a-z]+"}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": list(tags), **more}


def separated(**more: Any) -> dict[str, Any]:
    tags = [{"begin": "<", "content": WORD, "end": ">"}]
    return {"type": "tags_with_separator", "tags": tags, "separator": ",", **more}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def allows(lark: str, text: str) -> bool:
    """Return whether the grammar allows the entire text."""
    spec = LarkGrammar(lark)
    assert check_grammar(spec, SPECIAL) is None
    matcher = new_matcher(byte_tokenizer(SPECIAL), grammar_text(spec))
    pieces = re.split("|".join(map(re.escape, SPECIAL)).join("()"), text)
    ids: list[int] = []
    for piece in pieces:
        ids += [257 + SPECIAL.index(piece)] if piece in SPECIAL else piece.encode()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


A, B = tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", ANY, "</f>")

CASES: list[tuple[Any, list[str], list[str]]] = [
    (const("yes"), ["yes"], ["", "no", "yes."]),
    (NUMBER, ["12"], ["twelve"]),
    (WORD, ["word"], ["Word"]),
    (ANY, ["", "what\never"], []),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x", "1"]),
    (either(const("yes"), NUMBER), ["yes", "3"], ["no"]),
    (sequence(const("n="), NUMBER, const(";"), WORD), ["n=1;a"], ["n=1", "n=;a"]),
    (sequence(ANY, const("."), NUMBER), ["ab.1", ".1"], ["ab", "a.b.1"]),
    (sequence(const("a"), ANY), ["a", "abc"], ["", "b"]),
    (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>1 < 2</t>"], ["<t>", "<t></t>."]),
    (tag("<t>", WORD, ["</t>", ";"]), ["<t>a</t>", "<t>a;"], ["<t></t>", "<t>a"]),
    (tag("<t>", ANY, ["</t>", ";"]), ["<t>a</t>", "<t>a;"], ["<t>a;</t>"]),
    (tag("<t>", NUMBER, ""), ["<t>1"], ["<t>"]),
    (tag("<|call|>", ANY, "<|end_call|>"), ["<|call|>x<|end_call|>"], ["<|call|>x"]),
    (
        triggered(A, B),
        ["", "no call", "a <f=a>1</f> b <f=b>x y</f>", "<f=a>1</f>"],
        ["<f=c>", "<f=a>x</f>", "<f=a>1"],
    ),
    (
        triggered(A, stop_after_first=True),
        ["", "text", "text <f=a>1</f>"],
        ["<f=a>1</f>.", "<f=a>1</f><f=a>1</f>"],
    ),
    (
        triggered(A, at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f> and <f=a>2</f>."],
        ["", "text <f=a>1</f>"],
    ),
    (triggered(A, at_least_one=True, stop_after_first=True), ["<f=a>1</f>"], ["", "<f=a>1</f>."]),
    (
        tag("<all>", triggered(A), "</all>"),
        ["<all></all>", "<all>x<f=a>1</f>y</all>"],
        ["<all>x", "<all></all>x"],
    ),
    (separated(), ["", "<a>", "<a>,<b>"], ["<a>,", "<a><b>"]),
    (separated(at_least_one=True), ["<a>", "<a>,<b>"], [""]),
    (separated(stop_after_first=True), ["", "<a>"], ["<a>,<b>"]),
    (tag("[", separated(), "]"), ["[]", "[<a>,<b>]"], ["[,]"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES, ids=range(len(CASES)))
def test_structural_format_accepts_expected_texts(
    form: Any, good: list[str], bad: list[str]
) -> None:
    lark = lark_from_tag(StructuralTag({"type": "structural_tag", "format": form}), SPECIAL)
    assert [text for text in good if not allows(lark, text)] == []
    assert [text for text in bad if allows(lark, text)] == []


def test_triggered_structures_are_tags_in_any_text() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    structures = [{"begin": "<f=a>", "schema": schema, "end": "</f>"}]
    lark = lark_from_tag(StructuralTag({"structures": structures, "triggers": ["<f="]}))
    assert allows(lark, 'hello <f=a>{"x": 1}</f> bye')
    assert not allows(lark, 'hello <f=a>{"x": "1"}</f> bye')


def test_json_whitespace_follows_request() -> None:
    form = {"format": {"type": "json_schema", "json_schema": {"const": [1, 2]}}}
    assert allows(lark_from_tag(StructuralTag(form)), "[1, 2]")
    tight = lark_from_tag(StructuralTag(form, ""))
    assert allows(tight, "[1,2]")
    assert not allows(tight, "[1, 2]")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "format"),
        ({"format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "excludes"),
        ({"format": sequence()}, "elements"),
        ({"format": sequence(ANY, NUMBER)}, "any_text needs an end"),
        ({"format": triggered(tag("g", NUMBER, ""))}, "exactly one trigger"),
        ({"format": tag("<", NUMBER, ["", "x"])}, "no end"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "no value matches"),
        ({"structures": [], "triggers": ["x"]}, "structures"),
    ],
    ids=range(9),
)
def test_unenforceable_tags_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        lark_from_tag(StructuralTag(value))


# -- what is drawn under them ----------------------------------------------------------------------

Written = tuple[dict[str, Any], str]
"""A format, and a regular expression of its texts."""

PERSON = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "patternProperties": {"^score$": {}},
    "required": ["score"],
    "additionalProperties": False,
}
_LEAVES: st.SearchStrategy[Written] = st.one_of(
    st.sampled_from(["yes", "a b", "é<"]).map(lambda text: (const(text), re.escape(text))),
    st.sampled_from(["[a-f]{1,4}", "x|yz", "[0-9]{2}"]).map(
        lambda pattern: ({"type": "regex", "pattern": pattern}, f"(?:{pattern})")
    ),
    st.sampled_from([PERSON, {"enum": [True, "a"]}]).map(
        lambda schema: (
            {"type": "json_schema", "json_schema": schema},
            r"\s*(?:\{\s*\"score\"\s*:\s*\d\s*\}|true|\"a\")\s*",
        )
    ),
)


def _in_order(parts: list[Written]) -> Written:
    return sequence(*[form for form, _ in parts]), "".join(pattern for _, pattern in parts)


def _any_of(parts: list[Written]) -> Written:
    return either(*[form for form, _ in parts]), f"(?:{'|'.join(p for _, p in parts)})"


def _tagged(part: Written) -> Written:
    return tag("<t>", part[0], "</t>"), f"<t>{part[1]}</t>"


def _several(part: Written) -> Written:
    form = {"type": "tags_with_separator", "separator": ";", "at_least_one": True}
    one = f"<t>{part[1]}</t>"
    return {**form, "tags": [tag("<t>", part[0], "</t>")]}, f"(?:{one}(?:;{one})*)"


_WRITTEN = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_in_order),
        st.lists(inner, min_size=1, max_size=2).map(_any_of),
        inner.map(_tagged),
        inner.map(_several),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def table() -> Iterator[GrammarTable]:
    with bundled_table() as made:
        yield made


@pytest.mark.slow
def test_random_outputs_fit_random_structural_tags(table: GrammarTable) -> None:
    @settings(max_examples=50)
    @given(_WRITTEN, st.integers(0, 99))
    def check(written: Written, seed: int) -> None:
        form, pattern = written
        text = write(
            table, LarkGrammar(lark_from_tag(StructuralTag({"format": form}))), random.Random(seed)
        )
        assert re.fullmatch(pattern, text), (form, text)

    check()


def test_calls_in_any_text_reach_no_dead_end(table: GrammarTable) -> None:
    schema = {"type": "json_schema", "json_schema": PERSON}
    form = triggered(tag("<f=a>", schema, "</f>"), at_least_one=True, stop_after_first=True)
    lark = LarkGrammar(lark_from_tag(StructuralTag({"format": form})))
    for seed in range(6):
        text = write(table, lark, random.Random(seed))
        assert re.match(r"<f=a>\s*\{\s*\"score\"\s*:\s*\d\s*\}\s*</f>", text), text


def test_too_long_tag_is_refused_before_parsing() -> None:
    """Each of its prefixes is compared with all triggers."""
    names = [f"<{number}=" for number in range(20_000)]
    tags = [{"begin": name, "content": ANY, "end": "x"} for name in names]
    value = {"type": "triggered_tags", "triggers": names, "tags": tags}

    def refuse() -> None:
        with pytest.raises(BadGrammar, match="longer than 131072"):
            lark_from_tag(StructuralTag({"format": value}))

    takes_less_than(1, refuse)
