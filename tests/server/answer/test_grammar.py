import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from engine.shared.messages import JsonObjectGrammar, JsonSchemaGrammar, LarkGrammar, RegexGrammar
from server.answer.call_formats import CALL_FORMATS, JSON_LIST, CallFormat
from server.answer.parts import Call, Message, whole_message
from server.answer.reader import AnswerReader
from server.answer.tool_choice import CallsGrammar
from server.schema.tools import FunctionDefinition
from server.text.tokenizer import ServedTokenizer
from tests.server.tokens import id_of

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
FUNCTIONS = [
    FunctionDefinition(name="weather", parameters=CITY, strict=True),
    FunctionDefinition.model_validate({"name": "now"}),
]


BY_NAME = {**CALL_FORMATS, "json list": JSON_LIST}
ENFORCED = [each for each in BY_NAME.values() if each.syntax is not None]
NAMES = [name for name, each in BY_NAME.items() if each.syntax is not None]


@pytest.fixture(params=[False, True], ids=["plain markers", "special markers"])
def tokenizer(request: pytest.FixtureRequest, backend: Tokenizer) -> ServedTokenizer:
    own = Tokenizer.from_str(backend.to_str())
    markers = dict.fromkeys(marker for format in ENFORCED for marker in format.markers)
    tags = [AddedToken(marker, special=True) for marker in markers]
    if request.param:
        own.add_special_tokens(tags)
    return ServedTokenizer(own, eos_token_ids=[id_of(own, "<|eos|>")])


def accepts(grammar: LarkGrammar, text: str, tokenizer: ServedTokenizer) -> bool:
    """Return whether the grammar matches the entire text."""
    tokens = LLTokenizer(tokenizer.backend.to_str(), eos_token=min(tokenizer.eos_token_ids))
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(format: CallFormat, *calls: tuple[str, Any]) -> str:
    syntax = format.syntax
    assert syntax is not None
    texts = [
        syntax.before.replace("{name}", json.dumps(name)).replace("{bare_name}", name)
        + json.dumps(arguments)
        + syntax.after
        for name, arguments in calls
    ]
    return syntax.opening + syntax.separator.join(texts) + syntax.closing


@pytest.mark.parametrize("format", ENFORCED, ids=NAMES)
def test_calls_in_the_models_own_format_are_enforced(
    format: CallFormat, tokenizer: ServedTokenizer
) -> None:
    def allowed(*calls: tuple[str, Any], parallel: bool = True) -> bool:
        grammar = CallsGrammar(
            FUNCTIONS, format, parallel=parallel, is_special=tokenizer.is_special_text
        ).calls()
        return accepts(grammar, written(format, *calls), tokenizer)

    assert allowed(("weather", {"city": "Oslo", "days": 3}))
    assert allowed(("now", {}))
    assert allowed(("now", {"what": ["ever"]}))
    assert allowed(("now", {}), ("weather", {"city": "Rome"}), ("now", {}))
    assert not allowed(("now", {}), ("now", {}), parallel=False)
    assert not allowed(("other", {}))
    assert not allowed(("weather", {"days": 3}))
    assert not allowed(("weather", {"city": "a name that is too long"}))
    assert not allowed(("weather", ["Oslo"]))
    grammar = CallsGrammar(FUNCTIONS, format, parallel=True, is_special=tokenizer.is_special_text)
    assert not accepts(grammar.calls(), "It is sunny.", tokenizer)


def test_an_answer_can_be_json_or_calls(tokenizer: ServedTokenizer) -> None:
    format = CALL_FORMATS["hermes"]
    grammar = CallsGrammar(FUNCTIONS, format, parallel=True, is_special=tokenizer.is_special_text)
    both = grammar.calls_or(JsonObjectGrammar())
    assert both is not None
    assert accepts(both, '{"any": "thing"}', tokenizer)
    assert accepts(both, written(format, ("now", {})), tokenizer)
    assert not accepts(both, "It is sunny.", tokenizer)
    only = grammar.calls_or(JsonSchemaGrammar('{"type": "object", "required": ["a"]}'))
    assert only is not None
    assert not accepts(only, '{"any": "thing"}', tokenizer)
    assert grammar.calls_or(RegexGrammar("a*")) is None


def test_calls_within_text_fit_their_schemas(tokenizer: ServedTokenizer) -> None:
    def allowed(text: str, *, parallel: bool = True) -> bool:
        grammar = CallsGrammar(
            FUNCTIONS,
            CALL_FORMATS["hermes"],
            parallel=parallel,
            is_special=tokenizer.is_special_text,
        ).calls_in_text()
        assert grammar is not None
        return accepts(grammar, text, tokenizer)

    good = written(CALL_FORMATS["hermes"], ("weather", {"city": "Oslo"}))
    bad = written(CALL_FORMATS["hermes"], ("weather", {"town": "Oslo"}))
    assert allowed("")
    assert allowed("It is sunny.\nIf a <b and b <tool")
    assert allowed(good)
    assert allowed(f"Let me see.\n{good}\n{good}")
    assert not allowed(bad)
    assert not allowed(f"Let me see.\n{good}\n{bad}")
    llama = CallsGrammar(
        FUNCTIONS, CALL_FORMATS["llama3_json"], parallel=True, is_special=tokenizer.is_special_text
    )
    assert llama.calls_in_text() is None


@pytest.mark.parametrize("format", ENFORCED, ids=NAMES)
def test_enforced_calls_are_read_by_parser(format: CallFormat) -> None:
    reader = AnswerReader(None, format.parser(FUNCTIONS))
    text = written(format, ("now", {}), ("weather", {"city": "Oslo"}))
    message = whole_message(reader.push(text) + reader.finish())
    calls = [Call("now", "{}"), Call("weather", '{"city": "Oslo"}')]
    assert message == Message(None, None, calls)
