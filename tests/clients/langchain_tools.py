"""LangChain's tools, structured output and Responses API against a running server.

pip install langchain-openai && BASE_URL=http://127.0.0.1:8000/v1 python langchain_tools.py
"""

import os
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Verona", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"It is sunny in {city}."


class Scene(BaseModel):
    """A scene of a play."""

    place: Literal["Verona", "Rome"]
    act: Literal[1, 2, 3, 4, 5]


def make(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=os.environ.get("MODEL", "swell-shakespeare"),
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=0,
        max_tokens=200,
        **options,
    )


question = HumanMessage("What is the weather?")
for choice in ("required", "get_weather"):
    bound = make().bind_tools(
        [get_weather], tool_choice=choice, parallel_tool_calls=False, strict=True
    )
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Verona", "Rome")
    print(f"tool_choice {choice}:", call["name"], call["args"])

    whole = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    print("streamed: the same")

result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
print("after the result:", repr(make().invoke([question, answer, result]).content[:40]))

for method in ("json_schema", "function_calling"):
    scene = make().with_structured_output(Scene, method=method, strict=True).invoke("Set a scene.")
    assert isinstance(scene, Scene)
    print(f"with_structured_output {method}:", scene)

responses = make(use_responses_api=True, output_version="responses/v1")
answer = responses.invoke([question])
print("responses:", repr(answer.text[:40]), answer.usage_metadata["output_tokens"], "tokens")
text = "".join(chunk.text for chunk in responses.stream([question]))
assert text == answer.text
print("responses, streamed: the same")
(call,) = (
    responses.bind_tools(
        [get_weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    .invoke([question])
    .tool_calls
)
print("responses, tool call:", call["name"], call["args"])
