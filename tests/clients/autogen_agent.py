"""autogen: an assistant with a tool, whole and as a stream."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import BASE_URL, MODEL, QUESTION, get_weather

info = ModelInfo(
    vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
)
client = OpenAIChatCompletionClient(model=MODEL, base_url=BASE_URL, api_key="none", model_info=info)


async def main() -> None:
    for streamed in (False, True):
        agent = AssistantAgent(
            "agent",
            client,
            tools=[get_weather],
            reflect_on_tool_use=True,
            model_client_stream=streamed,
        )
        print((await agent.run(task=QUESTION)).messages[-1].content)


asyncio.run(main())
