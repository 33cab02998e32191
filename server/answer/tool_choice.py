"""Tools and tool choice of a request: what its prompt shows and how its answers are constrained."""

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal

import msgspec

from engine.shared.grammar_schema import closed
from engine.shared.messages import GrammarSpec, JsonObjectGrammar, JsonSchemaGrammar, LarkGrammar
from server.answer.call_formats import JSON_LIST, CallFormat
from server.answer.formats import AnswerFormats
from server.errors import invalid_field
from server.schema.tools import (
    AllowedToolsChoice,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoice,
)

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments, always of type object."""
    return {**ANY_ARGUMENTS, **(function.parameters or {})}


class CallsGrammar:
    """Grammars of calls to some functions, in llguidance's Lark syntax.

    Every schema is a separate root, so that references within it keep their meaning.

    Args:
        format: the model's call format; it must have a syntax.
        parallel: whether several calls are allowed.
        is_special: returns whether a text is a special token of the tokenizer.
    """

    def __init__(
        self,
        functions: Sequence[FunctionDefinition],
        format: CallFormat,
        *,
        parallel: bool,
        is_special: Callable[[str], bool],
    ) -> None:
        self._functions = functions
        assert format.syntax is not None, "the others cannot be enforced"
        self._syntax = format.syntax
        self._parallel = parallel
        before = self._syntax.opening + self._syntax.before
        self._marker = next((each for each in format.markers if before.startswith(each)), None)
        """Marker that starts every call, or the list of calls."""
        self._special = [marker for marker in format.markers if is_special(marker)]
        self._cut = re.compile(f"({'|'.join(map(re.escape, self._special))})")

    def calls(self) -> LarkGrammar:
        """Return the grammar of one or more calls and nothing else."""
        return self._lark("start: calls", self._calls_rule(), *self._call_rules(""))

    def calls_or(self, answer: GrammarSpec) -> LarkGrammar | None:
        """Return the grammar of either calls or an answer that matches `answer`.

        None if `answer` is not JSON, or if no marker distinguishes calls from JSON.
        """
        if self._marker is None:
            return None
        match answer:
            case JsonObjectGrammar():
                schema: Any = ANY_ARGUMENTS
            case JsonSchemaGrammar():
                schema = json.loads(answer.schema)
                if not isinstance(schema, dict):
                    return None
                options = {"lenient": answer.lenient, "coerce_one_of": answer.lenient}
                schema = {**schema, "x-guidance": {**_JSON_STYLE, **options}}
            case _:
                return None
        return self._lark(
            "start: calls | answer",
            f"answer: %json {json.dumps(schema)}",
            self._calls_rule(),
            *self._call_rules(""),
        )

    def calls_in_text(self) -> LarkGrammar | None:
        """Return the grammar of free text in which calls match their schemas.

        None if calls have no start marker, or are written as a list with an opening text.
        """
        marker = self._marker
        if marker is None or self._syntax.opening:
            return None
        if marker in self._special:
            begin = f"begin: TEXT {marker}"
        else:
            begin = f"begin[lazy]: TEXT {json.dumps(marker)}"
        many = "*" if self._parallel else "?"
        return self._lark(
            f"start: (begin call){many} rest", "rest: TEXT", begin, *self._call_rules(marker), _TEXT
        )

    def _lark(self, *rules: str) -> LarkGrammar:
        return LarkGrammar("\n".join(rules))

    def _calls_rule(self) -> str:
        syntax = self._syntax
        calls = f"call ({self._literal(syntax.separator)} call)*" if self._parallel else "call"
        opening, closing = self._literal(syntax.opening), self._literal(syntax.closing)
        return f"calls: {' '.join(filter(None, [opening, calls, closing]))}"

    def _call_rules(self, matched: str) -> list[str]:
        """Return the rules of one call, of which the text `begun` has already been matched."""
        syntax = self._syntax
        names = [f"call_{index}" for index in range(len(self._functions))]
        rules = [f"call: {' | '.join(names)}"]
        for name, function in zip(names, self._functions, strict=True):
            before = syntax.before.replace("{name}", json.dumps(function.name))
            before = before.replace("{bare_name}", function.name)
            before, after = before.removeprefix(matched), syntax.after
            lenient = not function.strict
            options = {**_JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}
            schema = {**arguments_schema(function), "x-guidance": options}
            arguments = [f"{name}_arguments: %json {json.dumps(schema)}"]
            if function.input_grammar is not None:
                [parameter] = schema["properties"]
                arguments = [
                    f"{name}_arguments: {json.dumps(f'{{{json.dumps(parameter)}: ')} "
                    f'"\\"" {name}_input "\\"}}"',
                    f"{name}_input: %lark {{\n{function.input_grammar}\n}}",
                ]
            rules += [
                f"{name}: {self._literal(before)} {name}_arguments {self._literal(after)}",
                *arguments,
            ]
        return rules

    def _literal(self, text: str) -> str:
        """Return a string in Lark syntax, with markers as token references."""
        pieces = self._cut.split(text) if self._special else [text]
        written = [
            piece if piece in self._special else json.dumps(piece) for piece in pieces if piece
        ]
        return " ".join(written)


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a request uses its tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools for the template, as sent by the client."""
    mode: Literal["none", "auto", "required", "named"] = "none"
    functions: dict[int, FunctionDefinition] = {}
    """The functions that can be called, by their index in the request's tools."""
    format: CallFormat | None = None
    """Format in which calls are parsed; None if the answer cannot contain any."""
    parallel: bool = True
    """Whether several calls are allowed."""

    @property
    def forced(self) -> bool:
        """Whether the answer must contain a call."""
        return self.mode in ("required", "named")

    @property
    def schemas(self) -> Iterator[tuple[GrammarSpec, str]]:
        """The schemas and grammars that must be enforceable, each with its field."""
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
        """Return the grammar of the whole answer.

        Args:
            answer: constraint on answers without calls.
            is_special: returns whether a text is a special token of the tokenizer.
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
    """Return how a request uses its tools.

    Raises:
        ApiError: tools and choice do not match, or the model has no call format.
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
        reason = (
            "the server was started with --no-enable-auto-tool-choice"
            if not formats.auto_tool_choice
            else "the model's chat template shows no known format of tool calls: start the server "
            "with --tool-call-parser"
        )
        raise invalid_field(
            "tool_choice",
            f"'auto' is not available, because {reason}. 'none', 'required' and a named function "
            "are.",
        )
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
) -> tuple[Literal["none", "auto", "required", "named"], Set[str]]:
    """Return the mode and the function names that it applies to."""
    mode: Literal["none", "auto", "required", "named"]
    known = set(names)
    selected: Sequence[str] = ()
    match choice:
        case None:
            mode = "auto"
        case NamedTool():
            mode, selected = "named", [choice.function.name]
        case AllowedToolsChoice():
            mode = choice.allowed_tools.mode
            selected = [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            mode = choice
    for name in selected:
        if name not in known:
            raise invalid_field("tool_choice", f"there is no function {name!r} in tools")
    return mode, set(selected) or known
