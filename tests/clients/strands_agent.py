"""strands: an agent with a tool."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from weather import BASE_URL, MODEL, QUESTION, get_weather

model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": "none"}, model_id=MODEL)
agent = Agent(model=model, tools=[tool(get_weather)], callback_handler=None)
print(str(agent(QUESTION)).strip())
