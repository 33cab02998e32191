"""outlines: an answer as an object."""

import openai
import outlines
from pydantic import BaseModel
from weather import BASE_URL, MODEL, QUESTION


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    sunny: bool


model = outlines.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none"), MODEL)
print(Weather.model_validate_json(model(QUESTION, Weather)))
