"""smolagents: an agent that calls tools."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from weather import BASE_URL, MODEL, QUESTION, get_weather

model = OpenAIServerModel(model_id=MODEL, api_base=BASE_URL, api_key="none")
print(ToolCallingAgent(tools=[tool(get_weather)], model=model, verbosity_level=0).run(QUESTION))
