"""instructor against a running server: answers as objects.

pip install instructor && BASE_URL=http://127.0.0.1:8000/v1 python instructor_schema.py
"""

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Scene(BaseModel):
    """A scene of a play."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["Rome", "Verona"]
    act: int = Field(ge=1, le=5)


client = openai.OpenAI(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
scene = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(
    model="swell-shakespeare",
    messages=[{"role": "user", "content": "Where are we?"}],
    response_model=Scene,
    max_tokens=400,
    max_retries=0,
    seed=7,
)
assert isinstance(scene, Scene)
print("JSON_SCHEMA:", scene)
