"""Anthropic's own client against a running server.

pip install anthropic && BASE_URL=http://127.0.0.1:8000/v1 python anthropic_messages.py
"""

import os
from typing import Any

import anthropic

client = anthropic.Anthropic(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
fields: dict[str, Any] = {
    "model": "swell-shakespeare",
    "max_tokens": 24,
    "system": "You are Romeo.",
    "messages": [{"role": "user", "content": "Who is Juliet?"}],
    "extra_body": {"seed": 7},
}

answer = client.messages.create(**fields)
(block,) = answer.content
assert block.type == "text"
print("create:", repr(block.text), answer.stop_reason, answer.usage.output_tokens)

with client.messages.stream(**fields) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
(last,) = final.content
assert last.type == "text"
assert text == block.text == last.text
print("stream: the same")

counted = client.messages.count_tokens(
    **{name: fields[name] for name in ("model", "system", "messages")}
)
read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
assert counted.input_tokens == read
print("count_tokens:", counted.input_tokens)

tool: anthropic.types.ToolParam = {
    "name": "get_weather",
    "description": "Tell the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Verona", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
question: anthropic.types.MessageParam = {"role": "user", "content": "What is the weather?"}
asked: dict[str, Any] = {
    "model": "swell-shakespeare",
    "max_tokens": 200,
    "tools": [tool],
    "extra_body": {"seed": 7},
}
forced = {**asked, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
called = client.messages.create(**forced, messages=[question])
(use,) = called.content
assert use.type == "tool_use"
assert called.stop_reason == "tool_use"
print("tool_choice any:", use.name, use.input)

with client.messages.stream(**forced, messages=[question]) as stream:
    pieces = [event.partial_json for event in stream if event.type == "input_json"]
    (streamed,) = stream.get_final_message().content
assert streamed.type == "tool_use"
assert streamed.input == use.input
print("streamed: the same, in", len(pieces), "pieces")

result: anthropic.types.MessageParam = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."}],
}
turns: list[anthropic.types.MessageParam] = [
    question, {"role": "assistant", "content": called.content}, result
]  # fmt: skip
after = client.messages.create(**asked, tool_choice={"type": "auto"}, messages=turns)
print("after the result, tool_choice auto:", [block.type for block in after.content])
