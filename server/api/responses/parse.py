"""Conversion of response requests to generation requests, via chat completions."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from server.api.chat.parse import Blame, chat_request, conversation, renamed
from server.api.chat.parse import parse as parse_chat
from server.api.chat.schema import ChatCompletionRequest
from server.api.responses import schema
from server.api.responses.items import summary_of
from server.api.responses.tools import (
    LOCAL_SHELL,
    TOOL_SEARCH,
    chosen,
    function_name,
    offered_tools,
)
from server.errors import ApiError, invalid_field
from server.generate.model import ServedModel
from server.generate.request import Conversation, GenerationRequest
from server.limits import MAX_TOOL_CALLS
from server.schema.messages import RefusalPart

_SERVED_INCLUDES = {"message.output_text.logprobs"}
_ABSENT_CONTENT = {
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Values of `include` for content that responses here never have."""


def parse(
    request: schema.ResponsesRequest, model: ServedModel, max_model_len: int, earlier: int = 0
) -> GenerationRequest:
    """Convert a request to a generation request, via the chat completion that answers it.

    The first `earlier` items of the input belong to earlier responses or to a conversation.

    Raises:
        ApiError: the request is invalid or not supported; `param` names the field.
    """
    chat, blame = _as_chat(request, earlier)
    parsed = parse_chat(chat, model, max_model_len, blame)
    if request.truncation == "auto":
        (source,) = parsed.conversations
        parsed.conversations = [msgspec.structs.replace(source, shortened=True)]
    return parsed


def parse_count(request: schema.ResponsesRequest, earlier: int) -> tuple[Conversation, Blame]:
    """Return the conversation to count, and a function that rewrites errors in the client's terms.

    Raises:
        ApiError: the request is invalid or not supported; `param` names the field.
    """
    chat, blame = _as_chat(request, earlier)
    return conversation(chat, chat.messages), blame


def _as_chat(request: schema.ResponsesRequest, earlier: int) -> tuple[ChatCompletionRequest, Blame]:
    """Return a chat completion, and a function that maps its errors back to the request."""
    _check(request)
    continues_field = "previous_response_id" if request.conversation is None else "conversation"
    chat = _ChatMessages()
    if request.instructions is not None:
        chat.add_message("system", request.instructions, "instructions")
    given = request.input or ""
    if isinstance(given, str):
        chat.add_message("user", given, "input")
    else:
        for index, item in enumerate(given):
            chat.add(item, continues_field if index < earlier else f"input[{index - earlier}]")
    body: dict[str, Any] = {name: getattr(request, name) for name in schema.COPIED_FIELDS}
    body |= {
        "messages": chat.messages,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": _wants_logprobs(request),
        "top_logprobs": request.top_logprobs if _wants_logprobs(request) else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "verbosity": request.text.verbosity if request.text is not None else None,
    }
    if request.structured_outputs is not None:
        # Only fields that were sent: defaults would count as constraints.
        body["structured_outputs"] = request.structured_outputs.model_dump(
            by_alias=True, exclude_unset=True
        )
    offered = offered_tools(request, earlier)
    body["tools"] = [{"type": "function", "function": tool.function} for tool in offered]
    if request.tool_choice is not None:
        body["tool_choice"] = chosen(request.tool_choice, request, offered)
    if request.text is not None and request.text.format is not None:
        format = request.text.format
        body["response_format"] = {"type": format.type}
        if format.type == "json_schema":
            sent = format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
            body["response_format"]["json_schema"] = sent

    def named(param: str) -> str:
        tool = _TOOL.match(param)
        if tool is None:
            return _renamed(chat.paths, param)
        found = offered[int(tool[1])]
        if tool[2] in (".parameters", ".input_grammar"):
            return f"{found.field}.{'format' if found.kind == 'custom' else 'parameters'}"
        return f"{found.field}{tool[2]}"

    def blame(error: ApiError) -> ApiError:
        return error.renamed(named)

    return chat_request(body, blame), blame


def _wants_logprobs(request: schema.ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or bool(_SERVED_INCLUDES.intersection(request.include or ()))


def _check(request: schema.ResponsesRequest) -> None:
    if request.prompt is not None:
        raise invalid_field(
            "prompt", "stored prompts are not supported; send instructions and input"
        )
    for index, value in enumerate(request.include or ()):
        if value not in _SERVED_INCLUDES | _ABSENT_CONTENT:
            raise invalid_field(f"include[{index}]", f"unknown value {value!r}")


class _ChatMessages:
    """Collects items into messages, each with the request field it came from.

    Consecutive items of the assistant form one turn.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def add_message(self, role: str, content: str | list[dict[str, Any]], path: str) -> None:
        self.messages.append({"role": role, "content": content})
        self.paths.append(path)

    def add(self, item: schema.InputItem, path: str) -> None:
        match item:
            case schema.MessageItem(role="assistant"):
                _check_parts(item.content, path, may_refuse=True)
                turn = self._assistant(path, closed_by=("content", "tool_calls"))
                turn["content"] = _text(item.content)
            case schema.MessageItem():
                _check_parts(item.content, path)
                self.add_message(item.role, _content(item.content), path)
            case schema.ReasoningItem():
                turn = self._assistant(path, closed_by=("content", "tool_calls"))
                thoughts = [part.text for part in item.content or ()]
                if thoughts:
                    turn["reasoning_content"] = "\n".join(thoughts)
            case schema.ItemReference():
                raise AssertionError("references are replaced by what they refer to")
            case schema.CompactionItem():
                summary = summary_of(item.encrypted_content)
                if summary is None:
                    raise invalid_field(
                        path, "a conversation that another server has compacted cannot be read"
                    )
                self.add_message("user", f"A summary of the conversation so far:\n{summary}", path)
            case _:
                self._add_tool_item(item, path)

    def _add_tool_item(self, item: schema.InputItem, path: str) -> None:
        """Add a tool call or its output; items of hosted tools are dropped."""
        match item:
            case schema.FunctionCallItem():
                name = function_name(item.name, item.namespace)
                self._call(item.call_id, name, item.arguments, path)
            case schema.CustomToolCallItem():
                name = function_name(item.name, item.namespace)
                self._call(item.call_id, name, {schema.CUSTOM_INPUT: item.input}, path)
            case schema.LocalShellCallItem():
                given = {k: v for k, v in item.action.items() if k != "type" and v}
                self._call(item.call_id or item.id, LOCAL_SHELL, given, path)
            case schema.ToolSearchCallItem() if item.call_id is not None:
                self._call(item.call_id, TOOL_SEARCH, item.arguments, path)
            case schema.FunctionCallOutputItem() | schema.CustomToolCallOutputItem():
                self._result(item.call_id, _content(item.output), path)
            case schema.LocalShellCallOutputItem():
                self._result(item.id, item.output, path)
            case schema.ToolSearchOutputItem() if item.call_id is not None:
                names = ", ".join([tool.name or tool.type for tool in item.tools])
                self._result(item.call_id, f"Found: {names or 'none'}.", path)

    def _call(self, call_id: str | None, name: str | None, arguments: Any, path: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        calls = self._assistant(path).setdefault("tool_calls", [])
        if len(calls) == MAX_TOOL_CALLS:
            raise invalid_field(path, f"more than {MAX_TOOL_CALLS} calls follow one another")
        calls.append(call)

    def _result(self, call_id: str, content: str | list[dict[str, Any]], path: str) -> None:
        self.add_message("tool", content, path)
        self.messages[-1]["tool_call_id"] = call_id

    def _assistant(self, path: str, closed_by: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the assistant turn that an item belongs to."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(key in last for key in closed_by):
            self.messages.append({"role": "assistant"})
            self.paths.append(path)
        return self.messages[-1]


def _content(content: str | Sequence[schema.MessageContent]) -> str | list[dict[str, Any]]:
    """Return content as one string if it has no image, else as its parts."""
    if isinstance(content, str):
        return content
    if not any(
        isinstance(part, schema.MediaPart) and part.image_url is not None for part in content
    ):
        return _text(content)
    return [
        {"type": part.type, "image_url": part.image_url}
        if isinstance(part, schema.MediaPart)
        else {"type": "text", "text": _text([part])}
        for part in content
    ]


def _text(content: str | Sequence[schema.MessageContent]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        match part:
            case RefusalPart():
                texts.append(part.refusal)
            case schema.MediaPart():
                texts.append(f"[{part.type} omitted: it cannot be shown to this model]")
            case _:
                texts.append(part.text)
    return "\n".join(texts)


def _check_parts(
    content: str | Sequence[schema.MessageContent], path: str, *, may_refuse: bool = False
) -> None:
    for index, part in enumerate([] if isinstance(content, str) else content):
        field = f"{path}.content[{index}]"
        if isinstance(part, RefusalPart) and not may_refuse:
            raise invalid_field(field, "only assistant messages can have a refusal")
        if isinstance(part, schema.MediaPart):
            if may_refuse:
                raise invalid_field(field, f"assistant messages cannot contain {part.type}")
            if part.type != "input_image":
                why = f"{part.type} is not supported; send its text as input_text"
                raise invalid_field(f"{field}.type", why)
            if part.image_url is None:
                why = "Field required; images by file_id are not supported"
                raise invalid_field(f"{field}.image_url", why)


_TOOL = re.compile(r"^tools\[(\d+)\](?:\.function(\.\w+)?.*)?")
_RENAMED = (
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^chat_template_kwargs\.reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^verbosity\b"), "text.verbosity"),
)


def _renamed(paths: Sequence[str], param: str) -> str:
    """Return the request field that a field of the chat completion was made from."""
    message = re.match(r"messages(?:\[(\d+)\])?", param)
    if message is None:
        return renamed(param, _RENAMED)
    if message[1] is None or int(message[1]) >= len(paths):
        return "input"
    path, rest = paths[int(message[1])], param[message.end() :]
    if not path.startswith("input["):
        return path
    call = re.match(r"\.tool_calls\[(\d+)\]\.function", rest)
    if call is None:
        return path + rest
    # Each call is a separate item, after the item that the turn started with.
    return path + rest[call.end() :] if call[1] == "0" else "input"
