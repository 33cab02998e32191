"""Calls as a list of Python calls, as Llama 3.2 and 4, ToolACE and others write them.

[get_weather(city="Oslo"), now()]
"""

import ast
import re
import warnings
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD
from server.tool_calls.json_value import json_text

START, END = "<|python_start|>", "<|python_end|>"

_MAX_CALL_CHARACTERS = 1 << 16
"""Of one call; parsing takes some hundred times its size in memory."""
_BEGIN = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_MAY_BEGIN = re.compile(r"\s*(?:[A-Za-z_][\w.-]*\s*)?")
_STRUCTURE = re.compile(r"['\"()\[\]{}]")
_STRING_END = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


class PythonicParser:
    """Reads an answer that begins with a list of calls; each is shown when it is complete.

    Since a bracket alone marks no call, only calls of the request's tools with keyword arguments
    of literals are calls; every other answer is content.
    """

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows."""
        self._names = frozenset([function.name for function in functions])
        self._held = ""
        self._state = self._begin
        self._scan = _Scan()
        self._name = ""
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        self._held += text
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is; a call stays unfinished."""
        left = self._held if self._state in (self._begin, self._content) or not self._count else ""
        return [ContentText(left)] if left else []

    # Each state takes the next piece off the held text and returns whether there may be another.

    def _begin(self, parts: list[Part]) -> bool:
        if len(self._held) > MAX_HEAD and not self._held.strip():
            return self._not_a_call()
        begin = self._held.lstrip()
        opened = begin.removeprefix(START)
        if opened is begin and START.startswith(begin):
            return False
        opened = opened.lstrip()
        if not opened:
            return False
        self._state = self._between if opened.startswith("[") else self._content
        return True

    def _content(self, parts: list[Part]) -> bool:
        if self._held:
            parts.append(ContentText(self._held))
            self._held = ""
        return False

    def _between(self, parts: list[Part]) -> bool:
        """Before a call, or behind the last: nothing is taken off until one is complete."""
        position = 0
        if not self._count:
            position = self._held.index("[") + 1
        else:
            rest = self._held.lstrip()
            if not rest and len(self._held) <= MAX_HEAD:
                return False
            if rest.startswith("]"):
                return self._end(rest[1:])
            if not rest.startswith(","):
                return self._not_a_call()
            position = len(self._held) - len(rest) + 1
        named = _BEGIN.match(self._held, position)
        if named is None:
            short = len(self._held) - position <= MAX_HEAD
            may_be = short and _MAY_BEGIN.fullmatch(self._held, position)
            return False if may_be else self._not_a_call()
        if named[1] not in self._names:
            return self._not_a_call()
        self._scan, self._name = _Scan(named.end() - 1), named[1]
        self._state = self._in_call
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        end = self._scan.advance(self._held)
        if end is None and self._scan.position - self._scan.start <= _MAX_CALL_CHARACTERS:
            return False
        arguments = None if end is None else _arguments(self._held[self._scan.start : end])
        if arguments is None or end is None:
            return self._not_a_call()
        parts += [CallBegin(self._count, self._name), CallArguments(self._count, arguments)]
        self._count += 1
        self._held, self._state = self._held[end:], self._between
        return True

    def _end(self, rest: str) -> bool:
        end = rest.lstrip()
        if len(rest) <= MAX_HEAD and END.startswith(end) and end != END:
            return False
        self._held = end.removeprefix(END) if end.startswith(END) else rest
        self._state = self._content
        return True

    def _not_a_call(self) -> bool:
        self._state = self._content
        return True


class _Scan:
    """Looks for the bracket that closes the one at `start`."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.position = start
        self._depth = 0
        self._quote = ""

    def advance(self, text: str) -> int | None:
        """Return the end of the call, None if it has not come."""
        while self.position < len(text):
            match = (_STRING_END[self._quote] if self._quote else _STRUCTURE).search(
                text, self.position
            )
            if match is None:
                self.position = len(text)
                return None
            found = match.group()
            if found == "\\":
                if match.end() == len(text):
                    self.position = match.start()
                    return None
                self.position = match.end() + 1
                continue
            self.position = match.end()
            if found in "'\"":
                self._quote = "" if self._quote else found
            elif found in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    return self.position
        return None


def _arguments(text: str) -> str | None:
    """Return `(key=literal, ...)` as a JSON object, None if it is anything else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts that models write
            call = ast.parse(f"_{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = _literal(keyword.value)
        return json_text(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    """Return a literal's value; names of JSON's constants count as them."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value: object = ast.literal_eval(node)
    return value
