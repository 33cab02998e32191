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
