"""A request for a response in the terms of all requests: as the chat completion that answers it."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic

from server.api.chat.parse import Blame, conversation
from server.api.chat.parse import parse as parse_chat
from server.api.chat.schema import ChatCompletionRequest
from server.api.responses.schema import (
    CUSTOM_INPUT,
    PASSED_ON,
    AllowedToolsChoice,
    ChosenTool,
    ContentPart,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemReference,
    MessageContent,
    MessageItem,
    ReasoningItem,
    RefusalContent,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)
from server.api.shared.body import JsonObject
from server.generate.request import Conversation, GenerationRequest, Limits
from server.http.errors import ApiError, invalid, invalid_body

_SERVED_INCLUDES = {"message.output_text.logprobs"}
_NOTHING_TO_ADD = {
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Values of `include` that are about things that no response here holds."""


def parse(request: ResponsesRequest, limits: Limits, earlier: int = 0) -> GenerationRequest:
    """Return what a request asks for, by way of the chat completion that answers it.

    So many items at the beginning of the input are of earlier responses, or of a conversation.

    Raises:
        ApiError: the request is wrong, or asks for what is not served; `param` names the field.
    """
    chat, blame = _as_chat(request, earlier)
    try:
        parsed = parse_chat(chat, limits, blame)
        if request.truncation == "auto":
            assert isinstance(parsed.source, Conversation)
            source = msgspec.structs.replace(parsed.source, shortened=True)
            parsed = msgspec.structs.replace(parsed, source=source)
        return parsed
    except ApiError as error:
        raise blame(error) from error


def parse_count(request: ResponsesRequest, earlier: int) -> tuple[Conversation, Blame]:
    """Return the conversation to count, and what turns errors about it into the client's terms.

    Raises:
        ApiError: the request is wrong, or asks for what is not served; `param` names the field.
    """
    chat, blame = _as_chat(request, earlier)
    return conversation(chat), blame


_INSTRUCTIONS, _EARLIER = -1, -2
"""What stands for the instructions, and for items that the request did not send itself."""


def _as_chat(request: ResponsesRequest, earlier: int) -> tuple[ChatCompletionRequest, Blame]:
    """Return a chat completion, and what turns errors about it into errors about the request."""
    _check(request)
    goes_on_with = "previous_response_id" if request.conversation is None else "conversation"
    turns = _Turns()
    if request.instructions is not None:
        turns.say("system", request.instructions, _INSTRUCTIONS)
    if isinstance(request.input, str):
        turns.say("user", request.input, 0)
    else:
        for index, item in enumerate(request.input):
            turns.add(item, _EARLIER if index < earlier else index - earlier)
    body: dict[str, Any] = {name: getattr(request, name) for name in PASSED_ON}
    body |= {
        "messages": turns.messages,
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": _wants_logprobs(request),
        "top_logprobs": request.top_logprobs if _wants_logprobs(request) else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
        "verbosity": request.text.verbosity if request.text is not None else None,
    }
    if request.structured_outputs is not None:
        # Only what was sent: an absent field is none of its constraints.
        body["structured_outputs"] = request.structured_outputs.model_dump(
            by_alias=True, exclude_unset=True
        )
    if request.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None and (request.tools or request.tool_choice != "auto"):
        body["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    encoded = msgspec.json.encode(body)

    def renamed(param: str) -> str:
        name = _renamed(turns.items, goes_on_with, param)
        tool = _PARAMETERS.match(name)
        if tool is None or (request.tools or [])[int(tool[1])].type != "custom":
            return name
        return f"tools[{tool[1]}].format"

    def blame(error: ApiError) -> ApiError:
        return error.renamed(renamed)

    try:
        chat = ChatCompletionRequest.model_validate_json(encoded)
    except pydantic.ValidationError as error:
        raise blame(invalid_body(error, encoded)) from error
    return chat, blame


def _wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the response has to show log probabilities."""
    return bool(request.top_logprobs) or bool(_SERVED_INCLUDES.intersection(request.include or ()))


def _check(request: ResponsesRequest) -> None:
    if request.prompt is not None:
        raise invalid("prompt: there are no stored prompts; send instructions and input", "prompt")
    for index, value in enumerate(request.include or ()):
        if value not in _SERVED_INCLUDES | _NOTHING_TO_ADD:
            raise invalid(f"include[{index}]: {value!r} is not known", f"include[{index}]")


class _Turns:
    """Collects items into messages: what the assistant did in a row is one turn."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.items: list[int] = []

    def say(self, role: str, content: str, index: int) -> None:
        """Add a message; system messages at the beginning are one."""
        opening = len(self.messages) == 1 and self.messages[0]["role"] == "system"
        if role in ("system", "developer") and opening:
            self.messages[0]["content"] += "\n\n" + content
            return
        self.messages.append({"role": role, "content": content})
        self.items.append(index)

    def add(
        self,
        item: InputItem,
        index: int,
    ) -> None:
        """Add an input item."""
        match item:
            case MessageItem(role="assistant"):
                turn = self._assistant(index, closed_by=("content", "tool_calls"))
                turn["content"] = _text(item.content)
            case MessageItem():
                _refuse_refusals(item.content, index)
                self.say(item.role, _text(item.content), index)
            case ReasoningItem():
                turn = self._assistant(index, closed_by=("content", "tool_calls"))
                thoughts = [part.text for part in item.content or ()]
                if thoughts:
                    turn["reasoning_content"] = "\n".join(thoughts)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._assistant(index).setdefault("tool_calls", []).append(call)
            case CustomToolCallItem():
                arguments = json.dumps({CUSTOM_INPUT: item.input})
                function = {"name": item.name, "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._assistant(index).setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                self.say("tool", _text(item.output), index)
                self.messages[-1]["tool_call_id"] = item.call_id
            case ItemReference():
                raise AssertionError("references are replaced by what they refer to")

    def _assistant(self, index: int, closed_by: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the assistant's turn that an item belongs to."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(key in last for key in closed_by):
            self.messages.append({"role": "assistant"})
            self.items.append(index)
        return self.messages[-1]


def _text(content: str | Sequence[ContentPart | RefusalContent]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        [part.refusal if isinstance(part, RefusalContent) else part.text for part in content]
    )


def _refuse_refusals(content: str | list[MessageContent], index: int) -> None:
    for place, part in enumerate([] if isinstance(content, str) else content):
        if isinstance(part, RefusalContent):
            field = f"input[{index}].content[{place}]"
            raise invalid(f"{field}: only assistants refuse", field)


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type == "custom":
        return _custom_tool(tool, index)
    if tool.type != "function":
        field = f"tools[{index}].type"
        raise invalid(
            f"{field}: {tool.type!r} is no function; tools that a server runs are not served", field
        )
    function = tool.model_dump(exclude_unset=True, exclude={"type", "format"})
    return {"type": "function", "function": function}


def _custom_tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    """Return the function that stands for a tool whose input is a text."""
    given: JsonObject = {"type": "string"}
    format, field = tool.format, f"tools[{index}].format"
    if format is not None and format.type == "grammar":
        if format.syntax != "regex" or not format.definition:
            raise invalid(
                f"{field}: of grammars those of the syntax regex are enforced, with a definition",
                field,
            )
        given["pattern"] = f"^(?:{format.definition})$"
    function: dict[str, Any] = {
        "name": tool.name,
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: given},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
        "strict": "pattern" in given,
    }
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: str | ChosenTool | AllowedToolsChoice) -> Any:
    def named(tool: ChosenTool) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.name}}

    match choice:
        case ChosenTool():
            return named(choice)
        case AllowedToolsChoice():
            allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def _response_format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    fields = {
        "name": format.name,
        "description": format.description,
        "schema": format.schema_,
        "strict": format.strict,
    }
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in fields.items() if value is not None},
    }


_PARAMETERS = re.compile(r"^tools\[(\d+)\]\.parameters\b")
_RENAMED = (
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^chat_template_kwargs\.reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^verbosity\b"), "text.verbosity"),
)


def _renamed(items: list[int], goes_on_with: str, param: str) -> str:
    """Return the field of the request that a field of the chat completion stands for."""
    message = re.match(r"messages(?:\[(\d+)\])?", param)
    if message is not None:
        return _input_field(param, items, goes_on_with, message)
    for pattern, name in _RENAMED:
        if pattern.match(param):
            return pattern.sub(name, param)
    return param


def _input_field(param: str, items: list[int], goes_on_with: str, message: "re.Match[str]") -> str:
    if message[1] is None or int(message[1]) >= len(items):
        return "input"
    index = items[int(message[1])]
    if index == _EARLIER:
        return goes_on_with
    rest = param[message.end() :]
    call = re.match(r"\.tool_calls\[(\d+)\]\.function", rest)
    if call is not None:
        # Calls are items of their own, which follow the one that the turn began with.
        return f"input[{index}]{rest[call.end() :]}" if call[1] == "0" else "input"
    return "instructions" if index == _INSTRUCTIONS else f"input[{index}]{rest}"
