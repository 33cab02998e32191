"""Clients and agents' frameworks in programs of a few lines, against a scripted model."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.clients.conftest import ENVIRONMENT, MODEL, Decide, Script, call, needs_node

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ANSWER = "It is sunny in Oslo."


def calls_once(prompt: str) -> str:
    """Call the tool, then answer."""
    return ANSWER if "<tool_response>" in prompt else call("get_weather", city="Oslo")


def calls_to_answer(prompt: str) -> str:
    """Call the tool, then another with the answer."""
    if "sunny in Oslo" in prompt:
        return call("final_answer", answer=ANSWER)
    return call("get_weather", city="Oslo")


OPENAI_2 = ("instructor_schema.py", "llama_index_chat.py", "strands_agent.py")
"""Those whose client takes no newer openai than 2."""
OTHERS = ("weather.py", "semantic_search.py", "langchain_embeddings.py", "cohere_rerank.py",
          "openai_auto_tools.py")  # fmt: skip
"""Scripts for other models."""


def run(script: str, url: str, model: str) -> list[str]:
    """Run a script in the environment of the clients; return the lines that it printed."""
    environment = {
        **os.environ, "BASE_URL": f"{url}/v1", "MODEL": model, "OPENAI_API_KEY": "none",
        "HOME": str(ENVIRONMENT),
    }  # fmt: skip
    if script.endswith(".mjs"):  # modules are looked for beside the file
        copied = ENVIRONMENT / script
        shutil.copyfile(HERE / script, copied)
        command = ["node", str(copied)]
    else:
        interpreter = ENVIRONMENT / ("openai2" if script in OPENAI_2 else "python") / "bin/python"
        command = [str(interpreter), str(HERE / script)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


SCRIPTED: list[tuple[str, Decide, list[str]]] = [
    ("agno_agent.py", calls_once, [ANSWER, ANSWER]),
    ("autogen_agent.py", calls_once, [ANSWER, ANSWER]),
    ("dspy_agent.py", lambda _: f"[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]",
     [ANSWER]),
    ("haystack_agent.py", calls_once, [ANSWER]),
    ("inspect_ai_task.py", calls_once, [ANSWER]),
    ("llm_prompt.py", calls_once, [ANSWER]),
    ("outlines_schema.py", lambda _: '{"city": "Oslo", "sunny": true}',
     ["city='Oslo' sunny=True"]),
    ("smolagents_agent.py", calls_to_answer, [ANSWER]),
    ("strands_agent.py", calls_once, [ANSWER]),
    ("anthropic_node.mjs", calls_once, [ANSWER]),
    ("ai_sdk_compatible.mjs", calls_once, [ANSWER, ANSWER]),
]  # fmt: skip


def cases(scripts: list[Any]) -> list[Any]:
    """Return the parameters of tests of scripts; those for Node are skipped without it."""
    marks = {True: [needs_node], False: []}
    return [
        pytest.param(*case, marks=marks[case[0].endswith(".mjs")], id=case[0]) for case in scripts
    ]


@pytest.mark.parametrize(("script", "decide", "printed"), cases(SCRIPTED))
def test_a_framework_gets_its_answer(
    scripted: Script, script: str, decide: Decide, printed: list[str]
) -> None:
    with scripted(decide) as model:
        assert run(script, model.url, MODEL) == printed
    statuses = {status for path, _, status in model.requests if "favicon" not in path}
    assert statuses == {200}, model.requests


SCRIPTS = sorted(
    {file.name for file in HERE.iterdir() if file.suffix in (".py", ".mjs")}
    - {file.name for file in HERE.glob("*test*.py")}
    - {case[0] for case in SCRIPTED}
    - set(OTHERS)
)


@pytest.mark.stack
@pytest.mark.parametrize("script", cases([(script,) for script in SCRIPTS]))
def test_client_runs_against_a_full_stack(stack: RunningStack, script: str) -> None:
    assert run(script, stack.url, "swell-shakespeare")
