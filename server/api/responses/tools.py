"""Functions of a chat completion that represent the tools of a response."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from server.answer.quoted_lark import NotQuotable, quoted_lark
from server.api.responses import schema
from server.errors import invalid_field
from server.limits import MAX_TOOLS
from server.schema.body import JsonObject
from server.schema.tools import not_served

LOCAL_SHELL, TOOL_SEARCH = "local_shell", "tool_search"

_COMMAND: JsonObject = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "integer"},
        "working_directory": {"type": "string"},
    },
    "required": ["command"],
}


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool of a response, and the function that represents it."""

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    name: str | None
    namespace: str | None
    function: JsonObject
    field: str
    """Path of the tool in the request."""


def function_name(name: str | None, namespace: str | None) -> str | None:
    """Return the name of the function that represents a tool."""
    if namespace is None or name is None:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def offered_tools(request: schema.ResponsesRequest, earlier: int) -> list[OfferedTool]:
    """Return the tools that the model can call; the first `earlier` items precede the request.

    Raises:
        ApiError: a tool is invalid; `param` names the field.
    """
    offered: list[OfferedTool] = []
    _offer(offered, _offered(request.tools or (), "tools", None), "tools")
    known = {tool.function["name"] for tool in offered}
    for index, item in enumerate([] if isinstance(request.input, str) else request.input):
        if isinstance(item, schema.ToolSearchOutputItem | schema.AdditionalToolsItem):
            tools_field = "input" if index < earlier else f"input[{index - earlier}].tools"
            number, found = len(offered), _offered(item.tools, tools_field, None)
            new = (tool for tool in found if tool.function["name"] not in known)
            _offer(offered, new, tools_field)
            known.update(tool.function["name"] for tool in offered[number:])
    return offered


def _offer(offered: list[OfferedTool], found: Iterator[OfferedTool], field: str) -> None:
    for tool in found:
        if len(offered) == MAX_TOOLS:
            raise invalid_field(field, f"the request offers more than {MAX_TOOLS} tools in all")
        offered.append(tool)


def chosen(
    choice: str | schema.ChosenTool | schema.AllowedToolsChoice,
    request: schema.ResponsesRequest,
    offered: Sequence[OfferedTool],
) -> Any:
    """Convert the tool choice to that of a chat completion.

    Raises:
        ApiError: it requires a tool that is not supported.
    """
    match choice:
        case schema.ChosenTool():
            return _named(choice, _by_choice(offered))
        case schema.AllowedToolsChoice():
            known = _by_choice(offered)
            served = [
                tool
                for tool in choice.tools
                if choice.mode == "required" or _choice_key(tool) in known
            ]
            if not served:
                return "none"
            allowed = {"mode": choice.mode, "tools": [_named(tool, known) for tool in served]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case "required" if request.tools and not offered:
            raise not_served(request.tools[0].name or request.tools[0].type, request.tools[0].type)
        case _:
            return choice


_Key = tuple[str, str | None, str | None]


def _by_choice(offered: Sequence[OfferedTool]) -> dict[_Key, OfferedTool]:
    """Return the first tool for each choice: by kind, and by kind, name and namespace."""
    known: dict[_Key, OfferedTool] = {}
    for tool in offered:
        known.setdefault((tool.kind, None, None), tool)
        known.setdefault((tool.kind, tool.name, tool.namespace), tool)
    return known


def _choice_key(tool: schema.ChosenTool) -> _Key:
    return (tool.type, tool.name, None if tool.name is None else tool.namespace)


def _named(tool: schema.ChosenTool, known: Mapping[_Key, OfferedTool]) -> JsonObject:
    found = known.get(_choice_key(tool))
    if found is None and tool.type not in ("function", "custom"):
        raise not_served(tool.name or tool.type, tool.type)
    name = function_name(tool.name, tool.namespace) if found is None else found.function["name"]
    return {"type": "function", "function": {"name": name}}


def _offered(
    tools: Sequence[schema.NamespacedTool], tools_field: str, namespace: str | None
) -> Iterator[OfferedTool]:
    for index, tool in enumerate(tools):
        field = f"{tools_field}[{index}]"
        match tool.type:
            case "function":
                sent = {"description", "parameters", "strict"} & tool.model_fields_set
                function = {name: getattr(tool, name) for name in sent}
                yield _tool("function", tool, namespace, function, field)
            case "custom":
                yield _tool("custom", tool, namespace, _custom_function(tool, field), field)
            case "local_shell":
                description = tool.description or "Run a command; returns its output."
                shell = {"description": description, "parameters": _COMMAND}
                yield OfferedTool("local_shell", None, None, {"name": LOCAL_SHELL, **shell}, field)
            case "tool_search" if tool.execution == "client":
                search = {"description": tool.description, "parameters": tool.parameters}
                yield OfferedTool("tool_search", None, None, {"name": TOOL_SEARCH, **search}, field)
            case "namespace" if isinstance(tool, schema.ResponseTool):
                yield from _offered(tool.tools or (), f"{field}.tools", tool.name)


def _tool(
    kind: Literal["function", "custom"],
    tool: schema.NamespacedTool,
    namespace: str | None,
    function: JsonObject,
    field: str,
) -> OfferedTool:
    named = {"name": function_name(tool.name, namespace), **function}
    return OfferedTool(kind, tool.name, namespace, named, field)


def _custom_function(tool: schema.NamespacedTool, field: str) -> JsonObject:
    """Return the function that represents a tool with plain text input."""
    given: JsonObject = {"type": "string"}
    function: JsonObject = {
        "parameters": {
            "type": "object",
            "properties": {schema.CUSTOM_INPUT: given},
            "required": [schema.CUSTOM_INPUT],
            "additionalProperties": False,
        },
        "strict": False,
    }
    description, format = tool.description, tool.format
    if format is not None and format.type == "grammar":
        if format.syntax is None or not format.definition:
            raise invalid_field(f"{field}.format", "needs a syntax and a definition")
        if format.syntax == "regex":
            given["pattern"] = f"^(?:{format.definition})$"
        else:
            try:
                function["input_grammar"] = quoted_lark(format.definition)
            except NotQuotable as error:
                raise invalid_field(f"{field}.format", str(error)) from error
        function["strict"] = True
        grammar = f"The input matches this {format.syntax} grammar:\n{format.definition}"
        description = grammar if description is None else f"{description}\n\n{grammar}"
    if description is not None:
        function["description"] = description
    return function
