"""pydantic-ai against a running server.

pip install 'pydantic-ai-slim[openai]'
BASE_URL=http://127.0.0.1:8000/v1 python pydantic_ai_agent.py
"""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
settings = {"max_tokens": 100, "seed": 7}


class Scene(BaseModel):
    """Where a scene is."""

    place: Literal["Rome", "Verona"]


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("swell-shakespeare", provider=provider)
    said = Agent(model, instructions="You are Romeo.").run_sync(
        "Who is Juliet?", model_settings={"max_tokens": 24}
    )
    print(f"{kind.__name__}: {said.output!r} {said.usage.output_tokens}")
    typed = Agent(model, output_type=NativeOutput(Scene)).run_sync(
        "Where are we?", model_settings=settings
    )
    print(f"{kind.__name__}, schema: {typed.output}")
    called = Agent(model, output_type=Scene).run_sync("Where are we?", model_settings=settings)
    print(f"{kind.__name__}, tool: {called.output}")
