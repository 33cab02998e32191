"""The `openai` package's typed clients on answers with reasoning and tool calls."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from server.config import FrontEndConfig
from server.config.answer import AnswerConfig
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import tiny

TEXT = (
    "<think>hm</think>Let me see.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def tokenizer(tokenizer: ServedTokenizer) -> ServedTokenizer:
    template = "{{ tools }}<tool_call>{{ messages[0].content }}"
    return ServedTokenizer(
        tokenizer.backend,
        eos_token_ids=list(tokenizer.eos_token_ids),
        chat_template=ChatTemplate(template, {}),
    )


@pytest.fixture
def config() -> FrontEndConfig:
    return tiny(answer=AnswerConfig(reasoning_parser="qwen3"))


@pytest.fixture
def client(
    app: FastAPI, engines: Any, served: Callable[[FastAPI], AbstractContextManager[str]]
) -> Iterator[openai.OpenAI]:
    engines.script = engines.answer(TEXT)
    with (
        served(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_the_chat_stream_helper_adds_calls_up(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True},
    }
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "weather?"}], tools=[tool]
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "hm"


def test_the_response_stream_helper_knows_every_event(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "parameters": PARAMETERS,
        "strict": True,
    }
    with client.responses.stream(model="tiny", input="weather?", tools=[tool]) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert events[0].type == "response.created"
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= {
        event.type for event in events
    }
    reasoning, message, call = last.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text == "hm"
    assert last.output_text == "Let me see."
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.arguments == '{"city": "Oslo"}'
    assert message.type == "message"


def test_response_output_can_be_sent_as_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="weather?", tools=[
        {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    ])  # fmt: skip
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    items: Any = [
        {"role": "user", "content": "weather?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model="tiny", input=items).status == "completed"
