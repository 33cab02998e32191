"""haystack: an agent with a tool."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from weather import BASE_URL, MODEL, QUESTION, get_weather

generator = OpenAIChatGenerator(
    model=MODEL, api_base_url=BASE_URL, api_key=Secret.from_token("none")
)
agent = Agent(chat_generator=generator, tools=[create_tool_from_function(get_weather)])
print(agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"][-1].text)
