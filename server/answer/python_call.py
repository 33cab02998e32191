"""Calls in Python syntax, as written by Llama 3.2 and 4, ToolACE and others.

get_weather(city="Oslo")
"""

import ast
import keyword
import re
from collections.abc import Callable

from server.answer.call_object import CallBody
from server.answer.json_value import json_text
from server.answer.parameters import MAX_CHARACTERS, Schemas, literal, parsed
from server.text.markers import MAX_HEAD

_BEGIN = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_MAY_BEGIN = re.compile(r"\s*(?:[A-Za-z_][\w.-]*\s*)?")
_STRUCTURE = re.compile(r"['\"()\[\]{}]")
_STRING_END = {quote: re.compile(rf"\\|{quote}") for quote in ("'", '"', "'''", '"""')}


_SUFFIX = "_of_tool"
_FIXED = re.compile(
    # Possessive and with optional ends, so that an unterminated string is scanned once.
    r"""(?P<text>'''(?:(?!''').)*+(?:''')?|\"\"\"(?:(?!\"\"\").)*+(?:\"\"\")?"""
    r"""|'(?:\\.|[^'\\])*+'?|"(?:\\.|[^"\\])*+"?)"""
    rf"|\b(?P<keyword>{'|'.join(keyword.kwlist)})(?=\s*=)|(?<![\w.])0+(?=[1-9])",
    re.DOTALL,
)


def _fixed(match: re.Match[str]) -> str:
    """Return valid Python for a match: keywords used as names, numbers with leading zeros."""
    if match["text"] is not None:
        return match[0]
    return match[0] + _SUFFIX if match["keyword"] is not None else ""


class PythonCall(CallBody):
    """Parses one call, which is recognized only when complete.

    Its arguments have to be literals, because no marker identifies calls. Positional arguments are
    assigned to the parameters in schema order.
    """

    def __init__(self, functions: Schemas, accepts: Callable[[str], bool]) -> None:
        super().__init__(functions, accepts)
        self._pieces: list[str] = []
        self._length = 0
        self._scan: _Scan | None = None

    @property
    def raw(self) -> str:
        return "".join(self._pieces)

    def push(self, text: str) -> str:
        if self._scan is None:
            text, self._pieces = self.raw + text, []
            start = self._begin(text)
            if start < 0:
                self._pieces = [text] if self.state == "open" else []
                return "" if self.state == "open" else text
            self._pieces, self._length, self._scan = [text[:start]], start, _Scan()
            text = text[start:]
        end = self._scan.advance(text)
        room = MAX_CHARACTERS - self._length
        if end is None and len(text) < room:
            self._pieces.append(text)
            self._length += len(text)
            return ""
        is_whole = end is not None and end <= room
        end = end if is_whole else room
        self._pieces.append(text[:end])
        arguments = self._parsed("".join(self._pieces[1:])) if is_whole else None
        self.state = "broken" if arguments is None else "done"
        if arguments is not None:
            self.name, self._arguments = self.candidate, [arguments]
        return text[end:]

    def _begin(self, text: str) -> int:
        """Return the position of the opening parenthesis, -1 if it has not come yet."""
        named = _BEGIN.match(text)
        if named is None:
            if len(text) > MAX_HEAD or not _MAY_BEGIN.fullmatch(text):
                self.state = "broken"
            return -1
        if not self._accepts(named[1]):
            self.state = "broken"
            return -1
        self.candidate = named[1]
        return named.end() - 1

    def _parsed(self, text: str) -> str | None:
        """Return `(key=literal, ...)` as a JSON object, None for any other text."""
        call = parsed(f"_{text}") or parsed(_FIXED.sub(_fixed, f"_{text}"))
        if not isinstance(call, ast.Call):
            return None
        names = self._functions.names(self.candidate or "")
        if len(call.args) > len(names):
            return None
        try:
            arguments = dict(zip(names, map(literal, call.args), strict=False))
            for each in call.keywords:
                key = (each.arg or "").removesuffix(_SUFFIX)
                if not key or key in arguments:
                    return None
                arguments[key] = literal(each.value)
            return json_text(arguments)
        except (ValueError, TypeError, RecursionError):
            return None


class _Scan:
    """Finds the bracket that closes the first one."""

    def __init__(self) -> None:
        self._tail = ""
        """Text held back because its meaning depends on what follows."""
        self._depth = 0
        self._quote = ""

    def advance(self, piece: str) -> int | None:
        """Return where the call ends in the next piece of text, None if it does not."""
        text = self._tail + piece
        position: int | None = 0
        before = len(self._tail)
        while position is not None and position < len(text):
            position = self._next(text, position)
            if position is not None and not self._depth:
                return position - before
        self._tail = "" if position is not None else self._tail
        return None

    def _next(self, text: str, position: int) -> int | None:
        """Return the position after the next relevant character, None if there is none yet."""
        if self._quote:
            return self._in_text(text, position)
        match = _STRUCTURE.search(text, position)
        if match is None:
            self._tail = ""
            return None
        found, start = match.group(), match.start()
        if found not in "'\"":
            self._depth += 1 if found in "([{" else -1
            return match.end()
        quotes = text[start : start + 3]
        if quotes in (found, found * 2):
            self._tail = quotes
            return None
        if quotes[:2] == found * 2 != quotes[1:]:
            return start + 2  # an empty string
        self._quote = found * 3 if quotes == found * 3 else found
        return start + len(self._quote)

    def _in_text(self, text: str, position: int) -> int | None:
        match = _STRING_END[self._quote].search(text, position)
        if match is None:
            self._tail = text[max(position, len(text) - len(self._quote) + 1) :]
            return None
        if match.group() != "\\":
            self._quote = ""
            return match.end()
        self._tail = "\\"
        return match.end() + 1 if match.end() < len(text) else None
