"""Grammars that hold an answer to tool calls, or its tool calls to their schemas."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from engine.shared.messages import GrammarSpec, JsonObjectGrammar, JsonSchemaGrammar, LarkGrammar
from server.answer.call_formats import CallFormat
from server.schema.tools import FunctionDefinition

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = r"TEXT: /(.|\n)*/"


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema that a function's arguments have to fit, always that of an object."""
    return {**ANY_ARGUMENTS, **(function.parameters or {})}


class CallsGrammar:
    """Grammars of calls of some functions, in Lark's syntax as llguidance knows it.

    Every schema is a root of its own, so that references within it keep their meaning.

    Args:
        functions: those that may be called.
        format: how the model writes calls; it has a syntax.
        parallel: whether there may be several.
        is_special: whether a text is a special token of the tokenizer.
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
        """What every call, or the list of them, begins with."""
        self._special = [marker for marker in format.markers if is_special(marker)]
        self._cut = re.compile(f"({'|'.join(map(re.escape, self._special))})")

    def calls(self) -> LarkGrammar:
        """Return the grammar of one call or several, and nothing else."""
        return self._lark("start: calls", self._calls_rule(), *self._call_rules(""))

    def calls_or(self, answer: GrammarSpec) -> LarkGrammar | None:
        """Return the grammar of calls, or else of such an answer.

        None for kinds but JSON, or if no marker tells calls from JSON.
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
        """Return the grammar of any text in which calls fit their schemas.

        None if no marker in the text says that a call begins, or if calls stand between others.
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

    def _call_rules(self, begun: str) -> list[str]:
        """Return the rules of one call, of which the text `begun` has come already."""
        syntax = self._syntax
        names = [f"call_{index}" for index in range(len(self._functions))]
        rules = [f"call: {' | '.join(names)}"]
        for name, function in zip(names, self._functions, strict=True):
            before = syntax.before.replace("{name}", json.dumps(function.name))
            before = before.replace("{bare_name}", function.name)
            before, after = before.removeprefix(begun), syntax.after
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
        """Return a text in Lark's syntax; markers as the tokens that they are."""
        pieces = self._cut.split(text) if self._special else [text]
        written = [
            piece if piece in self._special else json.dumps(piece) for piece in pieces if piece
        ]
        return " ".join(written)
