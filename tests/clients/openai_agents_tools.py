"""openai-agents with a tool: it is called, its result goes back, and then the model is free.

pip install openai-agents && BASE_URL=http://127.0.0.1:8000/v1 python openai_agents_tools.py
"""

import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Rome", "Verona"]) -> str:
    """Tell the weather in a city."""
    return f"It is sunny in {city}."


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    # After the first step openai-agents sets tool_choice back to auto by itself.
    agent = Agent(
        name="Romeo",
        instructions="You are Romeo.",
        model=kind("swell-shakespeare", client),
        tools=[get_weather],
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=0
        ),
    )
    found = Runner.run_sync(agent, "What is the weather?")
    shown = [type(item).__name__ for item in found.new_items]
    assert shown == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    print(f"{kind.__name__}: {found.new_items[1].output!r}, then {found.final_output[:40]!r}")
