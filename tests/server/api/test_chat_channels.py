"""Chat with models that write channel messages, and with models without tool support."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from engine.shared.messages import LarkGrammar
from server.answer.harmony import MARKERS
from server.config import FrontEndConfig
from server.config.answer import AnswerConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import prompt_of, tiny, tokenizer_with

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|channel|> {{ tools }} #}"
)
NO_TOOLS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
ADD = {"type": "function", "function": {"name": "add", "strict": True}}
CALLED = {"name": "add", "arguments": '{"a": 1}'}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
FINAL = "<|channel|>final<|message|>Yes."


@pytest.fixture
def tokenizer(backend: Tokenizer, template: str) -> ServedTokenizer:
    return tokenizer_with(
        backend, template, *[AddedToken(marker, special=True) for marker in MARKERS]
    )


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest.fixture
def config() -> FrontEndConfig:
    return tiny(answer=AnswerConfig())


def test_channels_are_parsed_without_flags(http: Any, engines: Any) -> None:
    engines.script = engines.answer(THOUGHT + FINAL)
    answer = http.chat()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_calls_in_channels_are_tool_calls(http: Any, engines: Any) -> None:
    engines.script = engines.answer(THOUGHT + CALL)
    (choice,) = http.chat(tools=[ADD])["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == CALLED
    assert choice["message"]["reasoning"] == "Hm."
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({"response_format": {"type": "json_object"}}, "final<|message|>"),
        ({"tools": [ADD], "tool_choice": "required"}, "<|start|>assistant"),
    ],
)
def test_response_format_applies_in_its_channel(
    http: Any, engines: Any, fields: dict[str, Any], after: str
) -> None:
    http.chat(**fields)
    sampling = engines.streams[-1].sampling
    assert sampling.grammar is not None
    assert sampling.grammar_after.endswith(after)
    assert sampling.grammar_opening == "<|channel|>analysis<|message|>"
    if "tools" in fields:
        assert isinstance(sampling.grammar, LarkGrammar)
        assert "to=functions.add" in sampling.grammar.text


@pytest.mark.parametrize("template", [NO_TOOLS])
def test_tools_are_described_to_models_whose_template_does_not_render_them(
    http: Any, engines: Any
) -> None:
    engines.context = 4096
    engines.script = engines.answer('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (choice,) = http.chat(
        tools=[ADD],
        messages=[
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "42", "tool_call_id": "x"},
        ],
    )["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == CALLED
    prompt = prompt_of(engines)
    assert prompt.startswith("[system]You can call functions.")
    assert prompt.endswith("[user]<tool_response>\n42\n</tool_response>")


@pytest.mark.parametrize(
    "template", ["{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
                 + NO_TOOLS],
)  # fmt: skip
def test_template_without_system_role_gets_no_system_message(http: Any, engines: Any) -> None:
    http.chat(tools=[ADD])
    prompt = prompt_of(engines)
    assert prompt.startswith("[user]You can call functions.")
