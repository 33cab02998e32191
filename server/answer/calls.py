"""Finds tool calls in text, given the markers that start, separate and end calls.

The call itself is parsed by a body parser: JSON, a name before JSON, parameters between tags, or
Python.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

from server.answer.call_object import CallBody, CallObject
from server.answer.json_value import JsonValue
from server.answer.parameters import Schemas
from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.schema.tools import FunctionDefinition
from server.text.markers import certain_length, find_first

_FENCES = ("```json", "```")
_MAX_NAME = 80
"""Maximum characters of a name without a start marker, and of whitespace after it."""
_LAST_WORD = re.compile(rf"([\w.-]{{1,{_MAX_NAME}}})(\s{{0,{_MAX_NAME}}})$")
_NO_OBJECT = re.compile(r"[^\s\"]")


MakeBody = Callable[[Schemas, Callable[[str], bool]], CallBody]
"""Creates a body parser from the request's functions and a predicate for callable names."""


class CallStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The markers around calls."""

    starts: tuple[str, ...] = ()
    """Start markers: calls follow them, even of functions unknown to the request."""
    ends: tuple[str, ...] = ()
    """End markers after calls, removed from the content."""
    bare: tuple[str, ...] = ()
    """Strings that can start a call without a start marker, of the request's functions only."""
    behind_name: str = ""
    """Like `bare`: a function's name followed by this string starts a call."""
    at_line: bool = False
    """Whether such a name has to be the first word on its line."""
    only_known: bool = False
    """Whether only the request's functions can be called even after a start marker."""
    skipped: tuple[str, ...] = ()
    """Strings allowed between a start marker and a call."""
    hidden: tuple[str, ...] = ()
    """Marks removed from the content."""
    separators: str = " \t\r\n,;]}"
    """Characters allowed after a call, before an end marker or the next call."""
    repeats: bool = False
    """Whether calls other than JSON objects can also follow each other without a start marker."""
    is_verbatim_behind: bool = False
    """Whether whitespace between a call and content is kept, as it is after an end marker."""
    body: MakeBody | None = None
    """Creates the parser of calls that are not JSON objects; None if all are."""


class CallsParser:
    """Parses content that contains any number of calls.

    Text that starts like a call but is not one stays content, including its markers. A call that
    is cut off by the end of the answer yields only its arguments.
    """

    def __init__(self, functions: Sequence[FunctionDefinition], style: CallStyle) -> None:
        """`functions` are those that the request allows."""
        self._style = style
        self._schemas = Schemas(functions)
        self._names = [function.name for function in functions]
        mark = (style.behind_name,) if style.behind_name else ()
        self._markers = (*style.starts, *style.bare, *style.hidden, *mark)
        self._held = ""
        self._state = self._content
        self._opened: list[str] = []
        """Text consumed at the start of a call; becomes content if no call follows."""
        self._is_marked = False
        """Whether there was a start marker: then this is a call, even of an unknown function."""
        self._body: CallBody | None = None
        self._begun = False
        self._ended = False
        """Whether an end marker followed the last call: then what follows is verbatim content."""
        self._count = 0
        self._in_word = self._in_line = False
        """Whether the content so far ends within a word, or on a line that is not blank."""
        self._skip = JsonValue("{")

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        self._held += text
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End of input: return the text held back, as content."""
        parts: list[Part] = []
        if self._body is not None:
            self._body.finish()
            self._of_body(self._body, parts)
        remaining = (
            "".join(self._opened) + ("" if self._body is None else self._body.raw) + self._held
        )
        named = self._body is not None and self._allows(self._body.candidate or "")
        if self._state == self._between or self._begun:
            remaining = ""
        elif self._state != self._content and (self._is_marked or self._count or named):
            remaining = ""  # a truncated call
        elif (
            self._count
            and len(remaining) > 1
            and any(each.startswith(remaining) for each in self._markers)
        ):
            remaining = ""
        return [*parts, ContentText(remaining)] if remaining else parts

    # Each state consumes a piece of the held text and returns whether to continue.

    def _content(self, parts: list[Part]) -> bool:
        style, held = self._style, self._held
        found = find_first(held, self._markers)
        if found is None:
            length = self._certain(held)
            self._add_content(held[:length], parts)
            self._held = held[length:]
            return False
        start, marker = found
        behind = start + len(marker)
        if marker == style.behind_name:
            start = self._named(held[:start])
        elif marker == "{" and _NO_OBJECT.match(held, behind):  # common in code
            start = -1
        if start < 0:
            self._add_content(held[:behind], parts)
            self._held = held[behind:]
            return True
        self._add_content(held[:start], parts)
        if marker in style.hidden:
            self._held = held[behind:]
            return True
        self._held, self._opened = held[start:], []
        self._is_marked = marker in style.starts
        if self._is_marked:
            self._opened.append(marker)
            self._held = self._held[len(marker) :]
        self._state = self._head
        return True

    def _certain(self, text: str) -> int:
        """Return the length of the prefix, in text without markers, that cannot start a call."""
        length = certain_length(text, self._markers)
        if self._style.behind_name:
            word = _LAST_WORD.search(text[max(0, length - _MAX_NAME) : length])
            if word is not None and (
                word[1] in self._schemas
                if word[2]
                else any(name.startswith(word[1]) for name in self._names)
            ):
                return length - len(word[0])
        return length

    def _named(self, before: str) -> int:
        """Return the offset of a function's name at the end of a text, -1 if there is none."""
        word = _LAST_WORD.search(before[-_MAX_NAME:])
        start = -1 if word is None else len(before) - len(word[0])
        if word is None or word[1] not in self._schemas:
            return -1
        if self._style.at_line:
            line = before[:start].rpartition("\n")
            within = bool(line[2].strip()) or (not line[1] and self._in_line)
        else:
            within = not start and self._in_word
        return -1 if within else start

    def _add_content(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        parts.append(ContentText(text))
        self._in_word = text[-1].isalnum() or text[-1] in "_.-"
        _, line_end, line = text.rpartition("\n")
        self._in_line = bool(line.strip()) or (not line_end and self._in_line)

    def _head(self, parts: list[Part]) -> bool:
        """State after a start marker: skip what is allowed before the call itself."""
        style = self._style
        rest = self._held.lstrip()
        self._opened.append(self._held[: len(self._held) - len(rest)])
        self._held = rest
        if not rest:
            return False
        openers = (*style.starts, *style.skipped, *_FENCES)
        if any(len(rest) < len(each) and each.startswith(rest) for each in openers):
            return False
        for opener in openers:
            if rest.startswith(opener):
                self._is_marked |= opener in style.starts
                self._opened.append(opener)
                self._held = rest[len(opener) :]
                return True
        if rest[0] == "[":
            self._opened.append("[")
            self._held = rest[1:]
            return True
        self._begin(rest[0])
        return True

    def _begin(self, first: str) -> None:
        is_strict = self._style.only_known or not self._is_marked
        accepts = self._allows if is_strict else bool
        if self._style.body is None or first == "{":
            required = is_strict and first == "{"
            self._body = CallObject(self._schemas, accepts, arguments_required=required)
        else:
            self._body = self._style.body(self._schemas, accepts)
        self._begun = False
        self._state = self._in_call

    def _allows(self, name: str) -> bool:
        return name in self._schemas

    def _in_call(self, parts: list[Part]) -> bool:
        body = self._body
        assert body is not None
        self._held = body.push(self._held)
        self._of_body(body, parts)
        if body.state == "open":
            return False
        self._body = None
        if self._begun:
            self._begun = False
            self._ended = self._style.is_verbatim_behind and "[" not in self._opened
            self._opened, self._state = [], self._between
            return True
        return self._no_call(body, parts)

    def _of_body(self, body: CallBody, parts: list[Part]) -> None:
        if body.name is None:
            return
        if not self._begun:
            self._begun = True
            parts.append(CallBegin(self._count, body.name))
            self._count += 1
        if arguments := body.take_arguments():
            parts.append(CallArguments(self._count - 1, arguments))

    def _no_call(self, body: CallBody, parts: list[Part]) -> bool:
        text = "".join(self._opened) + body.raw
        if not text:  # so that the rejected start of a call is not parsed again
            text, self._held = self._held[0], self._held[1:]
        self._add_content(text, parts)
        self._opened = []
        self._state = self._content
        if body.state == "refused":
            self._skip = JsonValue("{")
            self._skip.take(body.raw, 0)
            self._state = self._content if self._skip.done else self._skipping
        return True

    def _skipping(self, parts: list[Part]) -> bool:
        """State in a JSON object that is not a call: nested objects are not calls either."""
        end = self._skip.take(self._held, 0)
        self._add_content(self._held[:end], parts)
        self._held = self._held[end:]
        if self._skip.done:
            self._state = self._content
        return self._skip.done

    def _between(self, parts: list[Part]) -> bool:
        """State after a call: an end marker, then another call or content."""
        style = self._style
        rest = self._held.lstrip(style.separators)
        if self._ended:
            self._opened.append(self._held[: len(self._held) - len(rest)])
        self._held = rest
        if not rest:
            return False
        ends = style.ends if self._ended else (*style.ends, "```")
        begins = (*style.starts, *style.bare)
        if any(len(rest) < len(each) and each.startswith(rest) for each in (*begins, *ends)):
            return False
        for end in ends:
            if rest.startswith(end):
                self._ended, self._opened = True, []
                self._held = rest[len(end) :]
                return True
        if rest.startswith(begins):
            self._is_marked = rest.startswith(style.starts)
            self._state = self._head
            return True
        if not self._ended and (rest[0] == "{" or style.repeats):
            self._begin(rest[0])
            return True
        self._add_content("".join(self._opened), parts)
        self._opened, self._state = [], self._content
        return True
