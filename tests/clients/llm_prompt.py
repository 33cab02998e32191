"""llm: a prompt with a tool, on the command line."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weather import BASE_URL, MODEL, QUESTION

CODE = "def get_weather(city: str) -> str:\n    'Tell the weather.'\n    return f'sunny in {city}'"
with tempfile.TemporaryDirectory() as home:
    Path(home, "extra-openai-models.yaml").write_text(
        f"- model_id: swell\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n"
        "  supports_tools: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
    command = [Path(sys.executable).with_name("llm"), "-m", "swell", "--functions", CODE, QUESTION]
    subprocess.run(command, env=environment, check=True)
