"""Accepted grammars, and the errors of rejected ones."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher

from engine.shared.grammar_schema import ENFORCED_FORMATS
from engine.shared.grammar_spec import (
    BadGrammar,
    GrammarThreads,
    check_grammar,
    grammar_text,
    lark_from_ebnf,
)
from engine.shared.matchers import MAX_GRAMMAR_SIZE
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)
from tests.support.cpu_time import cpu_seconds, grows_no_faster_than_input, takes_less_than


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchemaGrammar('{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        JsonSchemaGrammar("true"),
        JsonSchemaGrammar('{"type": "string"}', whitespace=""),
        JsonSchemaGrammar('{"type": "string"}', whitespace="[ ]?"),
        JsonSchemaGrammar('{"type": "array", "uniqueItems": true}', lenient=True),
        JsonObjectGrammar(),
        RegexGrammar("[a-z]+@[a-z]+"),
        ChoiceGrammar(("yes", "no", 'a "quoted" / odd \x01 one', "é😀")),
        LarkGrammar('start: "a" | "b"'),
        LarkGrammar('start: "<call>" %json {"type": "object"} "</call>"'),
    ],
    ids=str,
)
def test_enforceable_grammars_are_accepted(spec: GrammarSpec) -> None:
    assert check_grammar(spec) is None


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (JsonSchemaGrammar('{"type": "objec"}'), "objec"),
        (JsonSchemaGrammar('{"type":'), "not valid JSON"),
        (JsonSchemaGrammar('"text"'), "must be a JSON object"),
        (JsonSchemaGrammar('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (JsonSchemaGrammar('{"$ref": "http://127.0.0.1/schema"}'), "127.0.0.1"),
        (JsonSchemaGrammar("[" * 100_000), "recursion"),
        (JsonSchemaGrammar("{}", whitespace="("), "unclosed group"),
        (RegexGrammar("[a-"), "unclosed character class"),
        (RegexGrammar("(?=a)b"), "look-around"),
        (RegexGrammar(""), "empty"),
        (RegexGrammar("(" * 10_000 + ")" * 10_000), "nest"),
        (RegexGrammar("a" * (MAX_GRAMMAR_SIZE + 1)), "longer than"),
        (ChoiceGrammar(()), "at least one choice"),
        (ChoiceGrammar(("a", "")), "empty"),
        (LarkGrammar('start: "a" other'), "other"),
        (LarkGrammar("start: " + "(" * 50_000), "deeply nested"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unenforceable_grammars_are_refused_with_reason(spec: GrammarSpec, told: str) -> None:
    reason = check_grammar(spec)
    assert reason is not None
    assert told in reason
    assert len(reason) < 600


def test_nested_repetitions_are_bounded_in_memory() -> None:
    before = psutil.Process().memory_info().rss
    check_grammar(RegexGrammar("(a{1000}){1000}"))
    assert psutil.Process().memory_info().rss - before < 150 * 2**20


def test_a_schema_of_many_properties_is_accepted() -> None:
    properties = {f"property_{i}": {"type": "string", "format": "date-time"} for i in range(900)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert check_grammar(JsonSchemaGrammar(json.dumps(schema))) is None


def test_long_chains_of_rules_do_not_crash() -> None:
    """They are followed by recursion in native code, so only the thread's stack bounds them."""
    chain = "start: a0\n" + "".join(f'a{i}: "x" (a{i + 1} | "y")?\n' for i in range(4800))
    text = chain + 'a4800: "x"\n'
    assert len(text) < MAX_GRAMMAR_SIZE
    threads = GrammarThreads(1, "test")
    try:
        assert threads.submit(check_grammar, LarkGrammar(text)).result(60) is None
    finally:
        threads.shutdown()


def test_chains_of_thousands_of_rules_are_refused_before_they_are_compiled() -> None:
    rules = [f"r{i}: r{i + 1}" for i in range(7000)]
    text = "\n".join(["start: r0", *rules, "r7000: /[a-z]*[aeiou][a-z]{60}/"])
    assert "7002 rules" in (check_grammar(LarkGrammar(text)) or "")
    groups = "\n".join(f"a{i}:{'(' * 20}a{i + 1}{')?' * 20}" for i in range(1700))
    assert "groups" in (check_grammar(LarkGrammar(f"start:a0\n{groups}\na1700:/a/")) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1_000_003},
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 99_991}] * 2},
        {"type": "number", "multipleOf": 0.100_003},
    ],
    ids=str,
)
def test_multiples_that_would_take_gigabytes_are_refused(schema: object) -> None:
    text = json.dumps(schema)
    for spec in (JsonSchemaGrammar(text), LarkGrammar(f"start: %json {text}")):
        assert "multipleOf" in (check_grammar(spec) or "")


def test_usual_multiples_are_accepted() -> None:
    properties = {
        name: {"type": "number", "multipleOf": each}
        for name, each in {"a": 0.01, "b": 5, "c": 1024, "d": 0.5, "e": 3600, "f": 10000}.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert check_grammar(JsonSchemaGrammar(json.dumps(schema))) is None


def test_a_pattern_that_forbids_keys_is_refused_unless_lenient() -> None:
    schema = json.dumps({"type": "object", "patternProperties": {"^x": False}})
    assert "patternProperties" in (check_grammar(JsonSchemaGrammar(schema)) or "")
    assert check_grammar(JsonSchemaGrammar(schema, lenient=True)) is None


def test_gbnf_is_converted_and_lark_is_unchanged() -> None:
    converted = lark_from_ebnf('root ::= "yes" | "no" maybe\nmaybe ::= [a-z]+\n')
    assert check_grammar(LarkGrammar(converted)) is None
    assert lark_from_ebnf('start: "a"') == 'start: "a"'


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('(("\\\\")?)?', '"\\\\"?'),
        ('(("a")+)+', '"a"+'),
        ('((("a")?)+)*', '"a"*'),
        ('"??" [?*+]', '"??" /[?*+]/'),
    ],
)
def test_double_repetition_is_simplified(rule: str, expected: str) -> None:
    converted = lark_from_ebnf(f"root ::= {rule}")
    assert converted.split("start: ")[1].strip() == expected
    assert check_grammar(LarkGrammar(converted)) is None


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "root ::= (",
        "root ::= missing",
        "root ::= " + "(" * 5000,
        "\n" * 60_000,
        'root ::= "' + "a" * 40_000 + '"',
    ],
)
def test_text_that_is_neither_gbnf_nor_lark_is_refused(text: str) -> None:
    with pytest.raises(BadGrammar):
        lark_from_ebnf(text)


def test_any_text_can_be_a_choice() -> None:
    odd = "".join(map(chr, [*range(1, 300), 0x2028, 0xFFFD, 0x10FFFF]))
    assert check_grammar(ChoiceGrammar((odd, json.dumps(odd)))) is None


EVIL_KEYS = {"a" * 60 + "!": {"type": "integer"}}
EVIL_PATTERNS = {"^(a+)+$": {"type": "integer"}}


@pytest.mark.parametrize(
    "spec",
    [
        JsonSchemaGrammar(
            json.dumps({"properties": EVIL_KEYS, "patternProperties": EVIL_PATTERNS})
        ),
        LarkGrammar(
            "start: %json "
            + json.dumps({"properties": EVIL_KEYS, "patternProperties": EVIL_PATTERNS})
        ),
        RegexGrammar("(a+)+b"),
        LarkGrammar("start: A\nA: /(a+)+b/"),
        JsonSchemaGrammar('{"type": "string", "pattern": "^(a+)+$"}'),
        JsonSchemaGrammar("{}", whitespace="( +)+"),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_nested_quantifiers_are_fast_in_all_pattern_positions(spec: GrammarSpec) -> None:
    assert check_grammar(spec) is None
    takes_less_than(2, lambda: check_grammar(spec))


@pytest.mark.parametrize(
    "part",
    ["a", "%json {", "%json ", '%json {"a":', '%json {"%json {":[', '%json {"":"', '\\"', '"',
     "/", "//", "\\/", "/\\", " ", "\t", "a:", "a : ", "(", "\n", "a\n", "start:", "[", '"a'],
)  # fmt: skip
@pytest.mark.parametrize("read", [lark_from_ebnf, lambda text: grammar_text(LarkGrammar(text))])
def test_grammar_parsing_time_is_linear(part: str, read: Callable[[str], str]) -> None:
    def reads(size: int) -> None:
        with contextlib.suppress(BadGrammar):
            read("start: " + part * (size // len(part)))

    whole = partial(reads, MAX_GRAMMAR_SIZE - 7)
    if cpu_seconds(whole) > 0.05:
        grows_no_faster_than_input(partial(reads, MAX_GRAMMAR_SIZE // 2), whole)


def test_grammar_with_slow_masks_is_refused() -> None:
    """Its first row has an item for each of these, and each is compared with all before it."""
    assert check_grammar(LarkGrammar("start: " + '("a")? ' * 500)) is None
    reason = check_grammar(LarkGrammar("start: " + '("a")? ' * 9900))
    assert "takes too long to follow" in str(reason)


def test_number_of_pattern_properties_is_limited() -> None:
    """Each is intersected with all others: 256 of them took the library nine seconds."""
    patterns = {f"^k{number}_[a-z]+$": {"type": "integer"} for number in range(65)}
    schema = json.dumps({"patternProperties": patterns})
    assert "more than 64 patterns" in (check_grammar(JsonSchemaGrammar(schema)) or "")
    del patterns["^k0_[a-z]+$"]
    at_most = JsonSchemaGrammar(json.dumps({"patternProperties": patterns}))
    assert check_grammar(at_most) is None
    takes_less_than(1, lambda: check_grammar(at_most))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},  # every z.record() of zod 4
        {"type": "object", "propertyNames": {}, "additionalProperties": {"type": "number"}},
        {"type": "string", "format": "path"},
        {"type": "string", "format": "password"},
        {"type": "string", "format": "binary"},
        {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
    ],
    ids=str,
)
def test_keywords_without_effect_are_accepted(schema: dict[str, Any]) -> None:
    for each in (
        schema,
        {"$defs": {"a": schema}, "anyOf": [{"items": schema}, {"$ref": "#/$defs/a"}]},
    ):
        assert check_grammar(JsonSchemaGrammar(json.dumps(each))) is None
        assert check_grammar(LarkGrammar(f"start: %json {json.dumps(each)}")) is None


def test_known_formats_equal_those_of_the_library() -> None:
    candidates = ENFORCED_FORMATS | {"idn-email", "iri", "uri-reference", "regex", "path", "byte"}
    for name in candidates:
        schema = {"type": "string", "format": name}
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
        assert (error == "") is (name in ENFORCED_FORMATS), name


@pytest.mark.parametrize("pattern", [r"^(?!x).*$", r"^(?=.*\d)[a-z\d]+$", r"\bword\b", r"^(a)\1$"])
def test_irregular_patterns_are_ignored_in_lenient_mode(pattern: str) -> None:
    of_string = {"type": "string", "pattern": pattern}
    of_keys = {
        "type": "object",
        "patternProperties": {pattern: {"type": "integer"}, "^y$": {"type": "null"}},
        "additionalProperties": False,
    }
    for schema in (of_string, of_keys):
        text = json.dumps(schema)
        assert check_grammar(JsonSchemaGrammar(text)) is not None
        assert check_grammar(JsonSchemaGrammar(text, lenient=True)) is None
