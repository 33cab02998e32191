"""Tools for models whose chat templates know none: told in words, in the form of Hermes models."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTION = """You can call functions. Each is described by one line of JSON:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the parameter": "its value"}}}}
</tool_call>
The result comes back between <tool_response> and </tool_response>."""


def told(
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    in_system: bool = True,
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are texts.

    Args:
        turns: messages as templates expect them, arguments of calls as objects.
        tools: what the request offers, as the client sent it.
        in_system: tell of the tools in the system message; else, for templates that take none, in
            the first message of the user.
    """
    plain = _as_texts(turns)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=lines)
    role = "system" if in_system else "user"
    for turn in plain:
        if turn["role"] == role or (in_system and turn["role"] == "developer"):
            before = turn["content"]
            whole = (before, instruction) if in_system else (instruction, before)
            turn["content"] = "\n\n".join(filter(None, whole))
            return plain
    return [{"role": role, "content": instruction}, *plain]


def _as_texts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without calls; results of tools are the user's, in one message each time.

    Many templates want the user and the assistant to alternate.
    """
    plain: list[dict[str, Any]] = []
    of_tool = False
    for turn in turns:
        after_tool, of_tool = of_tool, turn["role"] == "tool"
        text = turn.get("content") or ""
        if of_tool:
            text = f"<tool_response>\n{text}\n</tool_response>"
        joins = of_tool or (after_tool and turn["role"] == "user")
        if joins and plain and plain[-1]["role"] == "user":
            plain[-1]["content"] += f"\n{text}"
            continue
        role = "user" if of_tool else turn["role"]
        calls = [_written(call["function"]) for call in turn.get("tool_calls", ())]
        kept = {key: value for key, value in turn.items() if key != "tool_calls"}
        plain.append({**kept, "role": role, "content": "\n".join(filter(None, [text, *calls]))})
    return plain


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):  # text: what a model once wrote instead of JSON
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>"
