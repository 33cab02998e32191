"""Tools, tool choices and tool calls in requests and answers."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field

from server.errors import ApiError, invalid_field
from server.limits import MAX_TOOLS
from server.schema.body import JsonObject, Name, RequestBody

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class FunctionDefinition(RequestBody):
    """A function that the model may call; what a template may read beyond this is passed on."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = Field(
        None, description="JSON schema of the arguments; default: an object."
    )
    strict: bool | None = Field(
        None, description="Refuse a schema that cannot be enforced in every detail."
    )
    input_grammar: Annotated[
        str | None,
        Field(exclude=True, description="Lark grammar of the JSON string of the only parameter."),
    ] = None


class Tool(RequestBody):
    """One tool; only functions are served."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestBody):
    """A function by its name."""

    name: Name


class NamedTool(RequestBody):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(RequestBody):
    """The tools that may be called, or of which one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestBody):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def not_served(name: str, kind: str | None) -> ApiError:
    """Return the error for a demanded tool that is neither a function nor run here."""
    return invalid_field(
        "tool_choice", f"{name!r} is of type {kind!r}, which is not served here; use a function"
    )


class FunctionCallTurn(RequestBody):
    """What a call in the conversation so far says."""

    name: Name
    arguments: str | JsonObject | None = Field(
        None,
        description="An object, usually as JSON text. Other text is shown to the model as it is.",
    )


class ToolCallTurn(RequestBody):
    """A call that the assistant has made in the conversation so far."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCallTurn


class FunctionCall(msgspec.Struct):
    """The function to call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that the client is asked to make."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionCallDelta(msgspec.Struct):
    """What is new of a call; the name comes once, first."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What is new of the `index`-th call; id and type come once, first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
