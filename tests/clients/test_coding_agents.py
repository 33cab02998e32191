"""Coding agents in sessions of their own: a task, calls of their tools, an edited file, an end."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import (
    KNOWN_TO_CODEX,
    MODEL,
    PROGRAMS,
    Script,
    Scripted,
    call,
    needs_node,
)

pytestmark = [pytest.mark.clients, needs_node]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TASK = "Replace hello by goodbye in notes.txt."


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The directory of a project with one file, beside which the agent's settings are."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("hello\n")
    return tmp_path / "work"


def run(program: str, *arguments: str, work: Path, **variables: str) -> str:
    """Run an agent until it ends; return what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(work.parent / "home"), **variables}
    ended = subprocess.run(
        [PROGRAMS / program, *arguments],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def claude(model: Scripted, work: Path, task: str = TASK) -> dict[str, Any]:
    """Return the result of a session of Claude Code."""
    printed = run(
        "claude", "-p", task, "--output-format", "json", "--permission-mode", "acceptEdits",
        work=work,
        ANTHROPIC_BASE_URL=model.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    result: dict[str, Any] = json.loads(printed)
    return result


def codex(model: Scripted, work: Path, name: str = MODEL) -> list[dict[str, Any]]:
    """Return the events of a session of Codex."""
    (work.parent / "home" / "config.toml").write_text(
        f'model = "{name}"\nmodel_provider = "swell"\n[model_providers.swell]\nname = "Swell"\n'
        f'base_url = "{model.url}/v1"\nwire_api = "responses"\nenv_key = "SWELL_API_KEY"\n'
    )
    printed = run(
        "codex", "exec", "--json", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", TASK,
        work=work,
        CODEX_HOME=str(work.parent / "home"),
        SWELL_API_KEY="none",
    )  # fmt: skip
    return [json.loads(line) for line in printed.splitlines()]


def assert_all_answered(model: Scripted, path: str) -> None:
    """Check that each request was answered."""
    statuses = [status for asked, _, status in model.requests if asked.startswith(path)]
    assert statuses
    assert set(statuses) == {200}, model.requests


def test_claude_code_reads_and_edits_a_file(scripted: Script, work: Path) -> None:
    notes = work / "notes.txt"

    def decide(prompt: str) -> str:
        results = prompt.count("<tool_response>")
        if results == 0:
            return f"Let me read it. {call('Read', file_path=str(notes))}"
        if results == 1:
            return call("Edit", file_path=str(notes), old_string="hello", new_string="goodbye")
        return "It says goodbye now."

    with scripted(decide) as model:
        result = claude(model, work)
    assert (result["is_error"], result["result"]) == (False, "It says goodbye now.")
    assert result["num_turns"] == 3
    assert notes.read_text() == "goodbye\n"
    assert_all_answered(model, "/v1/messages")
    assert "hello" in model.prompts[1].rpartition("<tool_response>")[2]


def test_claude_code_continues_after_image_and_malformed_call(scripted: Script, work: Path) -> None:
    (work / "dot.png").write_bytes(PNG)

    def decide(prompt: str) -> str:
        match prompt.count("<tool_response>"):
            case 0:
                return call("Read", file_path=str(work / "dot.png"))
            case 1:
                return '<tool_call>\n{"name": "Read", "arguments": {\'file\'}}\n</tool_call>'
            case _:
                return "Done."

    with scripted(decide) as model:
        result = claude(model, work, "What is in dot.png?")
    assert (result["is_error"], result["result"]) == (False, "Done.")
    assert_all_answered(model, "/v1/messages")
    assert "[image omitted: this model reads text]" in model.prompts[1]


def test_codex_runs_a_command_that_edits_a_file(scripted: Script, work: Path) -> None:
    def decide(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "It says goodbye now."
        return call("exec_command", cmd="sed -i s/hello/goodbye/ notes.txt && cat notes.txt")

    with scripted(decide) as model:
        events = codex(model, work)
    assert (work / "notes.txt").read_text() == "goodbye\n"
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["aggregated_output"] for item in items if "command" in item] == ["goodbye\n"]
    assert items[-1]["text"] == "It says goodbye now."
    assert events[-1]["type"] == "turn.completed"
    assert_all_answered(model, "/v1/responses")


def test_codex_applies_a_patch(scripted: Script, work: Path) -> None:
    """Models that Codex knows by name get a custom tool with a Lark grammar for patches."""
    patch = "*** Begin Patch\n*** Update File: notes.txt\n@@\n-hello\n+goodbye\n*** End Patch\n"

    def decide(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "It says goodbye now."
        return call("apply_patch", input=patch)

    with scripted(decide) as model:
        events = codex(model, work, KNOWN_TO_CODEX)
    assert (work / "notes.txt").read_text() == "goodbye\n"
    assert events[-1]["type"] == "turn.completed"
    assert_all_answered(model, "/v1/responses")
    tools = model.requests[-1][1]["tools"]
    assert [tool["format"]["syntax"] for tool in tools if tool["type"] == "custom"] == ["lark"]
