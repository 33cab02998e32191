"""LiteLLM against a running server.

pip install litellm && BASE_URL=http://127.0.0.1:8000/v1 python litellm_calls.py
"""

import os

import litellm

server = {
    "model": "hosted_vllm/swell-shakespeare",
    "api_base": os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "none"),
}
messages = [{"role": "user", "content": "Who is Juliet?"}]

answer = litellm.completion(**server, messages=messages, max_tokens=24, seed=7)
print("completion:", repr(answer.choices[0].message.content), dict(answer.usage)["total_tokens"])

parts = litellm.completion(**server, messages=messages, max_tokens=24, seed=7, stream=True)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == answer.choices[0].message.content
print("streamed: the same")

tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Verona"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
called = litellm.completion(
    **server, messages=messages, tools=[tool], tool_choice="required", max_tokens=200
)
(call,) = called.choices[0].message.tool_calls[:1]
print("tool call:", call.function.name)

try:
    litellm.completion(**server, messages=messages, temperature=9)
except litellm.BadRequestError as error:
    print("error:", str(error)[:90])
