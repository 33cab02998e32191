"""inspect-ai: a task whose solver has a tool."""

import os
import tempfile

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from weather import BASE_URL, MODEL, QUESTION

os.environ |= {"SWELL_BASE_URL": BASE_URL, "SWELL_API_KEY": "none"}


@tool  # type: ignore[untyped-decorator]
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Tell the weather in a city.

        Args:
            city: its name.
        """
        return f"sunny in {city}"

    return execute


task = Task(
    dataset=[Sample(input=QUESTION, target="sunny")],
    solver=[use_tools(get_weather()), generate()],
    scorer=includes(),
)
with tempfile.TemporaryDirectory() as logs:
    (log,) = evaluate(task, model=f"openai-api/swell/{MODEL}", log_dir=logs, display="none")
    print(log.samples[0].output.completion)
