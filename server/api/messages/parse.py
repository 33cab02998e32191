"""A request for a message in the terms of all requests: by way of a chat completion."""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pydantic

from server.api.chat.parse import Blame, conversation
from server.api.chat.parse import parse as parse_chat
from server.api.chat.schema import ChatCompletionRequest
from server.api.messages.schema import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from server.generate.request import Conversation, GenerationRequest, Limits
from server.http.errors import ApiError, invalid, invalid_body

_PASSED_ON = (
    "temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "max_tokens",
)  # fmt: skip


def parse(request: MessagesRequest, limits: Limits) -> GenerationRequest:
    """Return what a request asks for, by way of the chat completion that answers it.

    Raises:
        ApiError: the request is wrong, or asks for what is not served; `param` names the field.
    """
    chat, blame = _as_chat(request)
    try:
        return parse_chat(chat, limits, blame)
    except ApiError as error:
        raise blame(error) from error


def parse_count(request: CountTokensRequest) -> tuple[Conversation, Blame]:
    """Return the conversation to count, and what turns errors about it into the client's terms.

    Raises:
        ApiError: the request is wrong, or asks for what is not served; `param` names the field.
    """
    chat, blame = _as_chat(request)
    return conversation(chat), blame


def _as_chat(
    request: MessagesRequest | CountTokensRequest,
) -> tuple[ChatCompletionRequest, Blame]:
    """Return a chat completion, and what turns errors about it into errors about the request."""
    _check(request)
    turns = _Turns()
    if request.system is not None:
        turns.add({"role": "system", "content": _text(request.system)}, "system")
    for index, turn in enumerate(request.messages):
        turns.take(turn, f"messages[{index}]")
    body: dict[str, Any] = {"messages": turns.messages, **_template(request)}
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in _PASSED_ON}
        body["stop"] = request.stop_sequences or None
        body["user"] = request.metadata.user_id if request.metadata is not None else None
        body["include_reasoning"] = _shows_thinking(request)
        if request.thinking is not None:
            body["thinking_token_budget"] = request.thinking.budget_tokens
    if turns.messages[-1]["role"] == "assistant":
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(request.tools)]
        body |= _choice(request.tool_choice)
    elif request.tool_choice is not None and request.tool_choice.type not in ("auto", "none"):
        raise invalid("tool_choice: needs tools to choose from", "tool_choice")
    format = request.output_config.format if request.output_config is not None else None
    format = format or request.output_format
    if format is not None:
        json_schema = {"name": "answer", "schema": format.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    sent = {name: value for name, value in body.items() if value is not None}
    encoded = msgspec.json.encode(sent)

    def blame(error: ApiError) -> ApiError:
        return error.renamed(partial(_renamed, turns.places))

    try:
        chat = ChatCompletionRequest.model_validate_json(encoded)
    except pydantic.ValidationError as error:
        raise blame(invalid_body(error, encoded)) from error
    return chat, blame


def _check(request: MessagesRequest | CountTokensRequest) -> None:
    for name, why in (
        ("mcp_servers", "no tools run here; call them from the client"),
        ("context_management", "conversations are read as they are sent; shorten them yourself"),
        ("container", "no tools run here"),
    ):
        if getattr(request, name, None):
            raise invalid(f"{name}: {why}", name)
    thinking = request.thinking
    if thinking is None or not isinstance(request, MessagesRequest):
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens: Field required", "thinking.budget_tokens")
    if (thinking.budget_tokens or 0) >= request.max_tokens:
        raise invalid(
            "thinking.budget_tokens: must be less than max_tokens", "thinking.budget_tokens"
        )


def _template(request: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    """Return the fields that tell the chat template whether, and how much, the model thinks."""
    arguments = dict(request.chat_template_kwargs or {})
    thinking = request.thinking
    if thinking is not None:
        thinks = thinking.type != "disabled"
        arguments = {"enable_thinking": thinks, "thinking": thinks, **arguments}
    effort = request.output_config.effort if request.output_config is not None else None
    return {"chat_template_kwargs": arguments or None, "reasoning_effort": effort}


def _shows_thinking(request: MessagesRequest) -> bool:
    thinking = request.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")


class _Turns:
    """Collects the messages of the chat completion, each with the field that it is made of."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, message: dict[str, Any], place: str) -> None:
        """Add a message."""
        self.messages.append(message)
        self.places.append(place)

    def take(self, turn: Turn, place: str) -> None:
        """Add a turn: results of tools are messages of their own."""
        if isinstance(turn.content, str):
            self.add({"role": turn.role, "content": turn.content}, place)
        elif turn.role == "assistant":
            self.add(_assistant(turn.content, place), place)
        else:
            self._user(turn.content, place)

    def _user(self, blocks: Sequence[Block], place: str) -> None:
        said: list[str] = []
        for index, block in enumerate(blocks):
            match block:
                case TextBlock():
                    said.append(block.text)
                case ToolResultBlock():
                    text = _text(block.content or "")
                    if block.is_error:
                        text = f"Error: {text}"
                    message = {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
                    self.add(message, f"{place}.content[{index}]")
                case _:
                    raise _misplaced(block, place, index, "user")
        if said or not blocks:
            self.add({"role": "user", "content": "\n".join(said)}, place)


def _assistant(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                said.append(block.text)
            case ThinkingBlock():
                thought.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, place, index, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said)}
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _misplaced(block: Block, place: str, index: int, role: str) -> ApiError:
    field = f"{place}.content[{index}].type"
    return invalid(f"{field}: {block.type!r} is nothing that a turn of the {role} holds", field)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join([block.text for block in content])


def _tool(tool: MessageTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        field = f"tools[{index}].type"
        raise invalid(
            f"{field}: {tool.type!r} is no function; tools that a server runs are not served", field
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def _choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name: Field required", "tool_choice.name")
        wanted = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


_RENAMED = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"^response_format\b"), "output_config.format"),
    (re.compile(r"^max_completion_tokens\b"), "max_tokens"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^user\b"), "metadata.user_id"),
    (re.compile(r"^thinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"^(chat_template_kwargs\.)?reasoning_effort\b"), "output_config.effort"),
)


def _renamed(places: list[str], param: str) -> str:
    """Return the field of the request that a field of the chat completion stands for."""
    turn = re.match(r"messages\[(\d+)\]", param)
    if turn is not None and int(turn[1]) < len(places):
        return places[int(turn[1])]
    for pattern, name in _RENAMED:
        if pattern.match(param):
            return pattern.sub(name, param)
    return param
