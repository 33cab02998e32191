"""agno: an agent with a tool."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from weather import BASE_URL, MODEL, QUESTION, get_weather

model = OpenAILike(id=MODEL, base_url=BASE_URL, api_key="none")
agent = Agent(model=model, tools=[get_weather], telemetry=False)
print(agent.run(QUESTION).content)
print(
    "".join(
        event.content or ""
        for event in agent.run(QUESTION, stream=True)
        if event.event == "RunContent"
    )
)
