"""What the scripts of agents' frameworks share: the server, and a tool."""

import os

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("MODEL", "swell-shakespeare")
QUESTION = "What is the weather in Oslo?"


def get_weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"
