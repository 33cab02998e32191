"""From a request's tools and tool choice to what its prompt shows and what its answer may be."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from engine.shared.grammar_schema import closed
from engine.shared.messages import GrammarSpec, JsonSchemaGrammar, LarkGrammar
from server.answer.call_formats import JSON_LIST, CallFormat
from server.answer.call_grammar import CallsGrammar, arguments_schema
from server.answer.formats import AnswerFormats
from server.errors import ApiError, invalid_field
from server.schema.tools import (
    AllowedToolsChoice,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoice,
)


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a request does with its tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools for the template, as the client sent them."""
    mode: Literal["none", "auto", "required", "named"] = "none"
    functions: dict[int, FunctionDefinition] = {}
    """The functions that may be called, by their index in the request's tools."""
    format: CallFormat | None = None
    """How calls are found in the answer; None if it cannot hold any."""
    parallel: bool = True
    """Whether there may be more than one call."""

    @property
    def forced(self) -> bool:
        """Whether the answer has to hold a call."""
        return self.mode in ("required", "named")

    @property
    def schemas(self) -> Iterator[tuple[GrammarSpec, str]]:
        """The schemas and grammars that have to be enforceable, each with its field."""
        for index, function in self.functions.items():
            if self.forced or function.strict:
                schema = json.dumps(arguments_schema(function))
                lenient = not function.strict
                field = f"tools[{index}].function.parameters"
                yield JsonSchemaGrammar(schema, lenient=lenient), field
                if function.input_grammar is not None:
                    field = f"tools[{index}].function.input_grammar"
                    yield LarkGrammar(function.input_grammar), field

    def grammar(
        self, answer: GrammarSpec | None, is_special: Callable[[str], bool]
    ) -> GrammarSpec | None:
        """Return what the whole answer is held to.

        Args:
            answer: what an answer without calls is held to.
            is_special: whether a text is a special token of the tokenizer.
        """
        if self.format is None or self.format.syntax is None:
            return answer
        functions = list(self.functions.values())
        parallel = self.parallel and self.mode != "named"
        grammar = CallsGrammar(functions, self.format, parallel=parallel, is_special=is_special)
        if self.forced:
            return grammar.calls()
        if answer is not None:
            return grammar.calls_or(answer) or answer
        if any(function.strict for function in functions):
            return grammar.calls_in_text()
        return None


def tool_use(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    formats: AnswerFormats,
    *,
    parallel: bool,
) -> ToolUse:
    """Return what a request does with its tools.

    Raises:
        ApiError: tools and choice do not fit each other, or the model has no format for calls.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid_field("tool_choice", "needs tools to choose from")
        return ToolUse()
    functions = _checked(tools)
    if formats.closes_objects:
        functions = {
            index: each.model_copy(update={"parameters": closed(each.parameters)})
            for index, each in functions.items()
        }
    shown = [tool.model_dump(exclude_unset=True) for tool in tools]
    mode, allowed = _chosen(choice, [function.name for function in functions.values()])
    if mode == "none":
        return ToolUse(shown=None if formats.exclude_unused_tools else shown)
    if mode == "auto" and (not formats.auto_tool_choice or formats.calls is None):
        raise _cannot_parse(formats)
    format = formats.calls or JSON_LIST
    if mode != "auto" and format.syntax is None:
        format = JSON_LIST
    return ToolUse(
        shown=shown,
        mode=mode,
        functions={
            index: function for index, function in functions.items() if function.name in allowed
        },
        format=format,
        parallel=parallel,
    )


def _checked(tools: Sequence[Tool]) -> dict[int, FunctionDefinition]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            field = f"tools[{index}].function.name"
            raise invalid_field(field, f"two functions are named {name!r}")
        names.add(name)
        properties = arguments_schema(tool.function).get("properties")
        if tool.function.input_grammar is not None and len(properties or ()) != 1:
            field = f"tools[{index}].function.input_grammar"
            raise invalid_field(field, "needs parameters with exactly one property")
    return {index: tool.function for index, tool in enumerate(tools)}


def _chosen(
    choice: ToolChoice | None, names: Sequence[str]
) -> tuple[Literal["none", "auto", "required", "named"], Sequence[str]]:
    """Return the mode and the names that it is about."""
    mode: Literal["none", "auto", "required", "named"]
    wanted = names
    match choice:
        case None:
            mode = "auto"
        case NamedTool():
            mode, wanted = "named", [choice.function.name]
        case AllowedToolsChoice():
            mode = choice.allowed_tools.mode
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            mode = choice
    for name in wanted:
        if name not in names:
            raise invalid_field("tool_choice", f"there is no function {name!r} in tools")
    return mode, wanted


def _cannot_parse(formats: AnswerFormats) -> ApiError:
    reason = (
        "the server was started with --no-enable-auto-tool-choice"
        if not formats.auto_tool_choice
        else "the model's chat template shows no known format of tool calls: start the server "
        "with --tool-call-parser"
    )
    return invalid_field(
        "tool_choice",
        f"'auto' is not available, because {reason}. 'none', 'required' and a named function are.",
    )
