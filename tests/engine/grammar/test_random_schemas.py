"""Random output under a random schema matches the schema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.batch.batch import SlotStart
from engine.grammar.masks import GrammarTable
from engine.shared.grammar_spec import check_grammar
from engine.shared.messages import JsonSchemaGrammar, SamplingParams
from tests.support.drawing import EOS, TOKENIZER, write

_NAMES = st.text('abcxyz_é "\\\n', min_size=1, max_size=5)
_VALUES = st.none() | st.booleans() | st.integers(-999, 999) | st.text('ab"\\/\u00e9\n', max_size=4)


def _bounded(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(0, high - low)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    )


_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _bounded(-50, 300).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
    _bounded(0, 6).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from(["^[a-f]{2,4}$", "^x|y$", "^\\d{1,3}-\\w$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 8}
    ),
    st.lists(_VALUES, min_size=1, max_size=4, unique_by=repr).map(lambda v: {"enum": v}),
    _VALUES.map(lambda value: {"const": value}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: set[int]) -> dict[str, Any]:
        names = list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": [name for index, name in enumerate(names) if index in required],
            "additionalProperties": False,
        }

    properties = st.dictionaries(_NAMES, inner, max_size=3)
    return st.builds(build, properties, st.sets(st.integers(0, 2)))


_PATTERNS = st.sampled_from(["^a$", "^[ab]$", "^(score|a)$", "^z1?$", "^[xy]$", "^b{1,3}$"])


def _patterned(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with key patterns that match listed keys, only those, or others."""

    def build(properties: dict[str, Any], pattern: str, value: Any, required: bool) -> Any:
        return {
            "type": "object",
            "properties": properties,
            "patternProperties": {pattern: value},
            "required": list(properties)[: int(required)],
            "additionalProperties": False,
        }

    names = st.sampled_from(["a", "b", "score", "z1", "x"])
    properties = st.dictionaries(names, inner, max_size=3)
    return st.builds(build, properties, _PATTERNS, inner, st.booleans())


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, bounds: {
            "type": "array", "items": items, "minItems": bounds[0], "maxItems": bounds[1]
        },
        inner,
        _bounded(0, 3),
    )  # fmt: skip


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _patterned(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


def write_json(table: GrammarTable, schema: dict[str, Any], rng: random.Random) -> str:
    return write(table, JsonSchemaGrammar(json.dumps(schema, ensure_ascii=False)), rng)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_random_outputs_fit_random_schemas(table: GrammarTable) -> None:
    @settings(max_examples=120)
    @given(_SCHEMAS, st.integers(0, 999))
    def check(schema: dict[str, Any], seed: int) -> None:
        jsonschema.Draft202012Validator.check_schema(schema)
        reason = check_grammar(JsonSchemaGrammar(json.dumps(schema)))
        if "patternProperties" in json.dumps(schema):  # its constraints may be contradictory
            assume(reason is None or "nsatisfiable" not in reason)
        assert reason is None, reason
        text = write_json(table, schema, random.Random(seed))
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(text))

    check()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"score": {"type": "integer"}}, "patternProperties": {"^score$": {}}},
        {
            "properties": {"a": {"type": "null"}, "b": {"const": 1}},
            "patternProperties": {"^[ab]$": {}},
        },
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"maximum": 5}}},
    ],
    ids=str,
)
def test_pattern_that_matches_only_listed_keys_is_no_dead_end(
    table: GrammarTable, schema: dict[str, Any]
) -> None:
    schema = {"type": "object", "additionalProperties": False, **schema}
    schema["required"] = [next(iter(schema["properties"]))]
    for seed in range(20):
        text = write_json(table, schema, random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


def test_dead_end_is_an_error_and_not_a_clean_end(
    table: GrammarTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In case of unknown dead ends."""
    monkeypatch.setattr("engine.shared.grammar_schema.prepared", lambda schema, **_: schema)
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
        "patternProperties": {"^score$": {}},
        "required": ["score"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(max_tokens=1, seed=0, grammar=JsonSchemaGrammar(json.dumps(schema)))
    reasons: list[str] = []
    for seed in range(20):
        table.start(SlotStart(0, [5], 1, sampling))
        rng = random.Random(seed)
        drawn: list[int] = []
        ended: dict[int, str | None] = {}
        while not ended:
            token_id = rng.choice(table.choices([0])[0][0])
            drawn.append(token_id)
            ended = table.advance([0], [token_id]).reasons
        reason = ended[0]
        if reason is None:
            text = TOKENIZER.decode([t for t in drawn if t not in EOS])
            jsonschema.validate(json.loads(text), schema)
        else:
            reasons.append(reason)
    assert reasons
    assert all("nothing that fits the grammar can follow" in each for each in reasons)
