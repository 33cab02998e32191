"""What grammars are accepted, and what is said about those that are not."""

import json

import psutil
import pytest

from engine.shared.grammar_spec import (
    MAX_GRAMMAR_SIZE,
    BadGrammar,
    GrammarThreads,
    check_grammar,
    lark_from_ebnf,
)
from engine.shared.messages import (
    ChoiceGrammar,
    GrammarSpec,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)


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
def test_what_can_be_enforced_is_accepted(spec: GrammarSpec) -> None:
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
def test_what_cannot_be_enforced_is_refused_for_a_reason(spec: GrammarSpec, told: str) -> None:
    reason = check_grammar(spec)
    assert reason is not None
    assert told in reason
    assert len(reason) < 600


def test_repetitions_of_repetitions_take_no_gigabytes() -> None:
    before = psutil.Process().memory_info().rss
    check_grammar(RegexGrammar("(a{1000}){1000}"))
    assert psutil.Process().memory_info().rss - before < 150 * 2**20


def test_a_schema_of_many_properties_is_accepted() -> None:
    properties = {f"property_{i}": {"type": "string", "format": "date-time"} for i in range(900)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert check_grammar(JsonSchemaGrammar(json.dumps(schema))) is None


def test_long_chains_of_rules_do_not_end_the_process() -> None:
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


def test_gbnf_becomes_lark_and_lark_stays_as_it_is() -> None:
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
def test_what_is_repeated_twice_is_repeated_once(rule: str, expected: str) -> None:
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
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(BadGrammar):
        lark_from_ebnf(text)


def test_any_text_can_be_a_choice() -> None:
    odd = "".join(map(chr, [*range(1, 300), 0x2028, 0xFFFD, 0x10FFFF]))
    assert check_grammar(ChoiceGrammar((odd, json.dumps(odd)))) is None
