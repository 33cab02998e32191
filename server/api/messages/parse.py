"""Conversion of Messages requests to generation requests, via chat completions."""

import re
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NoReturn

from server.api.chat.parse import Blame, chat_request, conversation, renamed
from server.api.chat.parse import parse as parse_chat
from server.api.chat.schema import ChatCompletionRequest
from server.api.messages import schema
from server.errors import ApiError, invalid_field
from server.generate.model import ServedModel
from server.generate.request import Conversation, GenerationRequest
from server.limits import MAX_MESSAGES, MAX_TOOL_CALLS
from server.schema.tools import not_served

_COPIED_FIELDS = (
    "temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "max_tokens",
)  # fmt: skip


def parse(
    request: schema.MessagesRequest, model: ServedModel, max_model_len: int
) -> GenerationRequest:
    """Convert a body to a generation request, via the chat completion that answers it.

    Raises:
        ApiError: the request is invalid or not supported; `param` names the field.
    """
    chat, blame = _as_chat(request)
    return parse_chat(chat, model, max_model_len, blame)


def parse_count(request: schema.CountTokensRequest) -> tuple[Conversation, Blame]:
    """Return the conversation to count, and a function that maps errors to the request's fields.

    Raises:
        ApiError: the request is invalid or not supported; `param` names the field.
    """
    chat, blame = _as_chat(request)
    return conversation(chat, chat.messages), blame


def _as_chat(
    request: schema.MessagesRequest | schema.CountTokensRequest,
) -> tuple[ChatCompletionRequest, Blame]:
    """Return a chat completion, and a function that maps its errors back to the request."""
    _check(request)
    chat = _ChatMessages()
    if request.system is not None:
        chat.add({"role": "system", "content": _text(request.system)}, "system")
    for index, turn in enumerate(request.messages):
        chat.take(turn, f"messages[{index}]")
    if not chat.messages:
        raise invalid_field("messages", "has only blocks of tools that ran on another server")
    thinking, config = request.thinking, request.output_config
    body: dict[str, Any] = {
        "messages": chat.messages,
        "chat_template_kwargs": request.chat_template_kwargs,
        "thinking": None if thinking is None else {"type": thinking.type},
    }
    if config is not None:
        body["reasoning_effort"] = config.effort
    if isinstance(request, schema.MessagesRequest):
        body |= {name: getattr(request, name) for name in _COPIED_FIELDS}
        body["stop"] = request.stop_sequences or None
        body["user"] = request.metadata.user_id if request.metadata is not None else None
        if thinking is not None:
            omitted = thinking.type == "disabled" or thinking.display == "omitted"
            body["include_reasoning"] = not omitted
            body["thinking_token_budget"] = thinking.budget_tokens
    if chat.messages[-1]["role"] == "assistant":
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    functions = [
        index
        for index, tool in enumerate(request.tools or ())
        if tool.type in (None, "custom") and tool.name not in chat.removed_tools
    ]
    body["tools"] = [_tool((request.tools or [])[index]) for index in functions]
    if request.tool_choice is not None:
        body |= _choice(request.tool_choice, request.tools or [], functions, chat.removed_tools)
    format = (None if config is None else config.format) or request.output_format
    if format is not None:
        json_schema = {"name": "answer", "schema": format.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    sent = {name: value for name, value in body.items() if value is not None}

    def blame(error: ApiError) -> ApiError:
        return error.renamed(partial(_renamed, chat, functions))

    return chat_request(sent, blame), blame


def _check(request: schema.MessagesRequest | schema.CountTokensRequest) -> None:
    for name, why in (
        ("mcp_servers", "this server runs no tools: call them from the client"),
        ("container", "this server runs no tools"),
    ):
        if getattr(request, name, None):
            raise invalid_field(name, why)
    thinking = request.thinking
    if thinking is None or not isinstance(request, schema.MessagesRequest):
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise invalid_field("thinking.budget_tokens", "Field required")
    if (thinking.budget_tokens or 0) >= request.max_tokens:
        raise invalid_field("thinking.budget_tokens", "must be less than max_tokens")


class _ChatMessages:
    """Collects messages of the chat completion, each with the request field it came from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.parts: dict[str, str] = {}
        """Request field of each image, by its field in the chat completion."""
        self.removed_tools: set[str] = set()

    def add(self, message: dict[str, Any], path: str) -> None:
        if len(self.messages) == MAX_MESSAGES:  # a turn may have many tool results
            raise invalid_field(
                path, f"there are more than {MAX_MESSAGES} turns, tool results and system messages"
            )
        self.messages.append(message)
        self.paths.append(path)

    def take(self, turn: schema.Turn, path: str) -> None:
        """Add a turn; each tool result becomes a separate message."""
        if isinstance(turn.content, str):
            self.add({"role": turn.role, "content": turn.content}, path)
        elif turn.role == "assistant":
            self.add(_assistant(turn.content, path), path)
        elif turn.role == "system":
            texts = [
                self._system(block, f"{path}.content[{index}]")
                for index, block in enumerate(turn.content)
            ]
            self.add({"role": "system", "content": "\n".join(texts)}, path)
        else:
            self._user(turn.content, path)

    def _system(self, block: schema.Block, path: str) -> str:
        match block:
            case schema.TextBlock():
                return block.text
            case schema.ToolChangeBlock(type="tool_addition"):
                self.removed_tools.discard(block.tool.name)
                return f"The tool {block.tool.name} is available."
            case schema.ToolChangeBlock():
                self.removed_tools.add(block.tool.name)
                return f"The tool {block.tool.name} is no longer available."
            case _:
                _refuse(block, path, "system")

    def _user(self, blocks: Sequence[schema.Block], path: str) -> None:
        content = _MessageContent()
        for index, block in enumerate(blocks):
            field = f"{path}.content[{index}]"
            match block:
                case schema.ImageBlock():
                    content.add_image(block, field)
                case schema.TextBlock() | schema.SearchResultBlock():
                    content.add_text(_read(block))
                case schema.DocumentBlock() if block.source.type == "text":
                    content.add_text(_read(block))
                case schema.DocumentBlock():
                    source = f"{field}.source.type"
                    raise invalid_field(
                        source, f"only 'text' documents are supported, not {block.source.type!r}"
                    )
                case schema.ToolResultBlock():
                    self._result(block, field)
                case schema.HostedBlock():
                    pass
                case _:
                    _refuse(block, field, "user")
        if content.parts or not blocks:
            self._add_content({"role": "user"}, content, path)

    def _result(self, block: schema.ToolResultBlock, path: str) -> None:
        result = _MessageContent()
        content = block.content or ""
        for index, each in enumerate([] if isinstance(content, str) else content):
            if isinstance(each, schema.ImageBlock):
                result.add_image(each, f"{path}.content[{index}]")
            else:
                result.add_text(_read(each))
        if isinstance(content, str):
            result.add_text(content)
        if block.is_error:
            result.prepend("Error: ")
        self._add_content({"role": "tool", "tool_call_id": block.tool_use_id}, result, path)

    def _add_content(self, message: dict[str, Any], content: "_MessageContent", path: str) -> None:
        for part, field in content.fields.items():
            self.parts[f"messages[{len(self.messages)}].content[{part}]"] = field
        self.add({**message, "content": content.content}, path)


class _MessageContent:
    """Collects the content of a message: texts, and images with the fields they came from."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.fields: dict[int, str] = {}

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """One string if there are no images, else the list of parts."""
        return self.parts if self.fields else "\n".join(part["text"] for part in self.parts)

    def add_text(self, text: str) -> None:
        self.parts.append({"type": "text", "text": text})

    def prepend(self, text: str) -> None:
        if self.parts and self.parts[0]["type"] == "text":
            self.parts[0]["text"] = text + self.parts[0]["text"]
        else:
            self.parts.insert(0, {"type": "text", "text": text})
            self.fields = {part + 1: field for part, field in self.fields.items()}

    def add_image(self, block: schema.ImageBlock, field: str) -> None:
        self.fields[len(self.parts)] = field
        part: dict[str, Any] = {"type": "image"}
        source = block.source
        if source is not None and source.type == "url":
            part["image_url"] = source.url or ""
        elif source is not None and source.data is not None:
            part["image_url"] = f"data:{source.media_type or 'image/png'};base64,{source.data}"
        self.parts.append(part)


def _assistant(blocks: Sequence[schema.Block], path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case schema.TextBlock():
                texts.append(block.text)
            case schema.ThinkingBlock():
                thoughts.append(block.thinking)
            case schema.RedactedThinkingBlock() | schema.HostedBlock():
                pass
            case schema.CompactionBlock(content=None, encrypted_content=str()):
                raise invalid_field(
                    f"{path}.content[{index}]",
                    "a conversation that another server has compacted cannot be read",
                )
            case schema.CompactionBlock():
                texts.append(block.content or "")
            case schema.ToolUseBlock():
                if len(calls) == MAX_TOOL_CALLS:
                    raise invalid_field(
                        f"{path}.content[{index}]", f"a turn has at most {MAX_TOOL_CALLS} calls"
                    )
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                _refuse(block, f"{path}.content[{index}]", "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _refuse(block: schema.Block, path: str, role: str) -> NoReturn:
    field = f"{path}.type"
    raise invalid_field(field, f"{block.type!r} is not allowed in {role} turns")


def _text(content: str | Sequence[schema.TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _read(block: schema.ResultBlock) -> str:
    match block:
        case schema.TextBlock():
            return block.text
        case schema.SearchResultBlock():
            return "\n".join([block.title, block.source, *(each.text for each in block.content)])
        case schema.DocumentBlock() if block.source.type == "text":
            return "\n".join(filter(None, [block.title, block.source.data]))
        case schema.ToolReferenceBlock():
            return f"The tool {block.tool_name} is available."
        case _:
            return f"[{block.type} omitted: only plain-text documents are supported]"


def _tool(tool: schema.MessageTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def _choice(
    choice: schema.MessageToolChoice,
    tools: Sequence[schema.MessageTool],
    functions: Sequence[int],
    removed: Set[str],
) -> dict[str, Any]:
    chat_choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    demanded = tools if choice.type == "any" and not functions else ()
    if choice.type == "tool":
        demanded = [tool for tool in tools if tool.name == choice.name]
    for tool in demanded:
        if tool.name in removed:
            raise invalid_field("tool_choice", f"a tool_removal has removed {tool.name!r}")
    served = set(functions)
    others = {tool.name: tool.type for i, tool in enumerate(tools) if i not in served}
    if choice.type == "any" and others and not functions:
        raise not_served(*next(iter(others.items())))
    if choice.type == "tool":
        if choice.name is None:
            raise invalid_field("tool_choice.name", "Field required")
        if choice.name in others:
            raise not_served(choice.name, others[choice.name])
        chat_choice = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chat_choice, "parallel_tool_calls": not choice.disable_parallel_tool_use}


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


def _renamed(chat: _ChatMessages, functions: Sequence[int], param: str) -> str:
    """Return the request field from which a field of the chat completion was made."""
    tool = re.match(r"tools\[(\d+)\]", param)
    if tool is not None:
        param = f"tools[{functions[int(tool[1])]}]{param[tool.end() :]}"
    if param in chat.parts:
        return chat.parts[param]
    turn = re.match(r"messages\[(\d+)\]", param)
    if turn is not None and int(turn[1]) < len(chat.paths):
        return chat.paths[int(turn[1])]
    return renamed(param, _RENAMED)
