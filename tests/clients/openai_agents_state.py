"""openai-agents with state that the server keeps: previous_response_id, and conversations.

pip install openai-agents && BASE_URL=http://127.0.0.1:8000/v1 python openai_agents_state.py
"""

import os
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI

set_tracing_disabled(True)
server: dict[str, Any] = {
    "base_url": os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "none"),
}
model = OpenAIResponsesModel("swell-shakespeare", AsyncOpenAI(**server))
kept = OpenAI(**server)


def agent(**more: object) -> Agent:
    return Agent(name="Romeo", instructions="You are Romeo.", model=model, **more)


short = ModelSettings(max_tokens=300, temperature=0.5)
first = Runner.run_sync(agent(model_settings=short), "Who is Juliet?")
print("first:", repr(first.final_output))
second = Runner.run_sync(
    agent(model_settings=short), "And Tybalt?", previous_response_id=first.last_response_id
)
shown = kept.responses.retrieve(second.last_response_id)
assert shown.previous_response_id == first.last_response_id
before = kept.responses.retrieve(first.last_response_id)
assert shown.usage is not None
assert before.usage is not None
assert shown.usage.input_tokens > before.usage.input_tokens
print("second, after the first:", repr(second.final_output))

conversation = kept.conversations.create()
for question in ("Who is Juliet?", "And Tybalt?"):
    Runner.run_sync(agent(model_settings=short), question, conversation_id=conversation.id)
print("conversation:", len(list(kept.conversations.items.list(conversation.id))), "items")
