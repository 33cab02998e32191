"""Whatever clients send as tools, items and conversations is answered, and never with a 500."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.shared.config import ModelConfig
from server.config import FrontEndConfig
from server.config.answer import AnswerConfig
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer

HEADERS = {"content-type": "application/json"}
TEMPLATE = "{{ tools }}<tool_call>{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"

words = st.sampled_from(
    ["", "a", "auto", "none", "required", "function", "message", "user", "assistant", "tool",
     "system", "text", "input_text", "output_text", "function_call", "function_call_output",
     "reasoning", "json_object", "json_schema", "allowed_tools", "{}", "{", "\ud83d", "\x00", "<"]
)  # fmt: skip
keys = st.sampled_from(
    ["type", "role", "content", "name", "function", "arguments", "tool_calls", "parameters",
     "call_id", "tool_call_id", "id", "text", "output", "strict", "format", "schema", "tools",
     "mode", "allowed_tools", "summary", "properties", "$ref", "required", "reasoning_content"]
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 1) | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
function = st.fixed_dictionaries(
    {"name": words | st.just("f")}, optional={"parameters": values, "strict": values}
)
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": function})
    | st.fixed_dictionaries(
        {"type": st.just("function"), "name": st.just("f")}, optional={"parameters": values}
    )
    | values,
    max_size=2,
)
turns = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": words, "role": words, "content": values, "tool_calls": values, "name": words,
            "call_id": words, "arguments": words, "output": values, "summary": values,
        },
    )
    | values,
    max_size=3,
)  # fmt: skip
choices = (
    values
    | st.just({"type": "function", "function": {"name": "f"}})
    | st.just({"type": "function", "name": "f"})
)
fields = {
    "messages": turns, "input": turns | words, "tools": tools, "tool_choice": choices,
    "parallel_tool_calls": values, "text": values, "response_format": values,
    "reasoning": values, "metadata": values, "include": values, "instructions": values,
    "system": turns | words, "thinking": values, "stop_sequences": values, "max_tokens": values,
    "chat_template_kwargs": values, "reasoning_effort": words, "stream": st.booleans(),
}  # fmt: skip
bodies = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
)


@pytest.fixture
def tokenizer(tokenizer: ServedTokenizer) -> ServedTokenizer:
    return ServedTokenizer(
        tokenizer.backend,
        eos_token_ids=list(tokenizer.eos_token_ids),
        chat_template=ChatTemplate(TEMPLATE, {}),
    )


@pytest.fixture
def config() -> FrontEndConfig:
    return FrontEndConfig(
        model=ModelConfig(model="org/tiny"), answer=AnswerConfig(reasoning_parser="qwen3")
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_no_body_makes_the_server_fail(app: FastAPI, engines: Any, path: str) -> None:
    engines.script = engines.answer('<think>a</think><tool_call>{"name": "f"}')
    defaults = {"model": "org/tiny", "max_tokens": 9} if path == "/v1/messages" else {}

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies)
    def check(body: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "input": "x", **defaults, **body}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://swell") as client:
                return await client.post(path, content=json.dumps(body), headers=HEADERS)

        answer = asyncio.run(send())
        assert answer.status_code in (200, 400), (answer.text, body)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]

    check()
