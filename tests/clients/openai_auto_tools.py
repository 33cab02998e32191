"""`tool_choice: "auto"` with a model that calls by itself, whole and as a stream.

pip install openai && BASE_URL=http://127.0.0.1:8000/v1 python openai_auto_tools.py
"""

import json
import os
from typing import Any

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
MODEL = client.models.list().data[0].id
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def turns_of(city: str) -> list[Any]:
    """Return an earlier question of the conversation, which was answered with the tool."""
    name, arguments = "get_weather", json.dumps({"city": city})
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{city}", "content": "sunny"},
        {"role": "assistant", "content": f"It is sunny in {city}."},
    ]


earlier: list[Any] = [*turns_of("Paris"), *turns_of("Oslo")]
messages: list[Any] = [*earlier, {"role": "user", "content": "What is the weather in Rome?"}]
settings: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 80}

answer = client.chat.completions.create(messages=messages, tool_choice="auto", **settings)
message = answer.choices[0].message
print("auto:", answer.choices[0].finish_reason, repr(message.content))
for call in message.tool_calls or []:
    assert call.type == "function"
    print("call:", call.function.name, call.function.arguments)

with client.chat.completions.stream(messages=messages, **settings) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion().choices[0].message
assert [each.function.arguments for each in final.tool_calls or []] == [
    each.function.arguments for each in message.tool_calls or [] if each.type == "function"
]
print("streamed: the same")
