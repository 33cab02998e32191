"""Calls whose parameters stand between tags, as many models write them instead of JSON.

<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
"""

import re
from collections.abc import Callable

import msgspec

from server.answer.call_object import CallBody
from server.answer.json_value import JsonValue
from server.answer.named_call import known_name
from server.answer.parameters import Parameters, Schemas
from server.text.markers import MAX_HEAD, MarkerSearch, certain_length, find_first

_NAME = re.compile(r"\s*([\w.:/-]+)\s*")
_NAME_END = re.compile(r"[>\n<]")


class TaggedStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of a call.

    A name ends with `>`; quotes around it are removed, and attributes may follow it. Without a tag
    before the name, the name ends where the next tag starts.
    """

    call: str = ""
    call_end: str = ""
    parameter: str
    parameter_name_end: str = ">"
    value: str = ""
    """Tag before a value, if the value does not directly follow the parameter's tag."""
    parameter_end: str
    starts: tuple[str, ...] = ()
    """Markers before calls; they also end a call that lacks its end tag."""
    around: tuple[str, ...] = ()
    """Markers after calls; they also end a call that lacks its end tag."""
    ends_values: bool = True
    """Whether the end of a call ends a value that lacks its end tag."""
    trims_line_ends: bool = True
    """Whether one line end at each side of a value is removed."""


class TaggedCall(CallBody):
    """Parses one call; its arguments are emitted parameter by parameter."""

    def __init__(
        self, functions: Schemas, accepts: Callable[[str], bool], style: TaggedStyle
    ) -> None:
        super().__init__(functions, accepts)
        self._style = style
        begins = tuple(filter(None, (*style.starts, style.call)))
        ends = tuple(filter(None, (style.call_end, *style.around)))
        self._tags = (style.parameter, *ends, *begins)
        self._followers = {
            style.parameter_end: self._tags,
            style.call_end: (*style.around, *begins),
        }
        self._followers |= dict.fromkeys(style.around, begins)
        """What must follow each end marker of a value: values can contain such text themselves."""
        ends = ends if style.ends_values else ()
        self._value_ends = (style.parameter_end, style.parameter, *ends)
        self._held = ""
        self._step: Callable[[], bool] = self._head
        self._parameters = Parameters(functions, "")
        self._key, self._is_text = "", False
        self._value: list[str] = []
        """Pieces of the current value."""
        self._end = ""
        """The text that may have ended the value."""
        self._until = MarkerSearch(self._value_ends)
        self._json = JsonValue("{")
        self._is_empty = True
        """Whether only whitespace has followed the name."""
        self._closing = "{}"
        """Text that the call's end adds to the arguments; empty if they came in one piece."""

    @property
    def raw(self) -> str:
        return self._held if self.name is None and self.state == "open" else ""

    def push(self, text: str) -> str:
        self._held += text
        while self.state == "open" and self._step():
            pass
        if self.state == "open":
            return ""
        rest, self._held = self._held, ""
        return rest

    def finish(self) -> None:
        """End of input: a possible end of a value counts; an unfinished call stays unfinished."""
        if self._step == self._maybe_end:
            self._end_value()
            self._arguments += [] if self._end == self._style.parameter_end else ["}"]

    # Each step consumes a piece of the held text and returns whether to continue.

    def _head(self) -> bool:
        found = self._named() if self._style.call else self._bare_name()
        if found is None:
            if len(self._held) > MAX_HEAD:
                self.state = "broken"
            return False
        name, end = found
        self.candidate = known_name(name, self._functions)
        if not name or not self._accepts(self.candidate):
            self.state = "broken"
            return False
        self.name, self._step = self.candidate, self._in_call
        self._parameters = Parameters(self._functions, self.name)
        is_closed = self._held.startswith("/>", end - 2)
        self._held = self._held[end:]
        if is_closed:
            self._arguments.append("{}")
            self.state = "done"
        return not is_closed

    def _named(self) -> tuple[str, int] | None:
        """Return the name in the call's tag and where it ends, "" if it is invalid."""
        tag, held = self._style.call, self._held
        if not held.startswith(tag):
            return None if tag.startswith(held) else ("", 0)
        found = _NAME_END.search(held, len(tag))
        if found is None:
            return None
        name = _attribute(held[len(tag) : found.start()].removesuffix("/"))[0]
        if found[0] == ">":
            return name, found.end()
        is_known = known_name(name, self._functions) in self._functions
        return (name, found.start()) if is_known else ("", 0)

    def _bare_name(self) -> tuple[str, int] | None:
        """Return the name up to the next tag, "" if it is invalid."""
        named = _NAME.match(self._held)
        if named is None:
            return None if not self._held.strip() else ("", 0)
        rest = self._held[named.end() :]
        if rest.startswith(self._tags):
            return named[1], named.end()
        return None if any(tag.startswith(rest) for tag in self._tags) else ("", 0)

    def _in_call(self) -> bool:
        """State between parameters: text other than tags is ignored."""
        style = self._style
        if self._is_empty:
            self._held = self._held.lstrip()
            if self._held.startswith("{"):
                self._step = self._in_json
                return True
            self._is_empty = not self._held
        found = find_first(self._held, self._tags)
        if found is None:
            self._held = self._held[certain_length(self._held, self._tags) :]
            return False
        start, tag = found
        if tag == style.parameter and self._closing:
            self._held = self._held[start + len(tag) :]
            self._arguments += ["{"] if self._closing == "{}" else []
            self._closing, self._step = "}", self._in_parameter
            return True
        self._arguments.append(self._closing)
        self._held = self._held[start + (len(tag) if tag == style.call_end else 0) :]
        self.state = "done"
        return False

    def _in_json(self) -> bool:
        """State in arguments that are a single JSON object."""
        end = self._json.take(self._held, 0)
        self._arguments.append(self._held[:end])
        self._held = self._held[end:]
        if self._json.done:
            self._closing, self._is_empty, self._step = "", False, self._in_call
        return self._json.done

    def _in_parameter(self) -> bool:
        """State in a parameter's name. A line end also ends it, if a value tag follows directly."""
        style = self._style
        ends = (style.parameter_name_end, style.value or "\n")
        found = find_first(self._held, ends)
        if (len(self._held) if found is None else found[0]) > MAX_HEAD:
            self._step = self._in_call  # not a parameter: ignored like all text between tags
            return True
        if found is None:
            return False
        start, end = found
        self._key, attributes = _attribute(self._held[:start].replace(style.parameter, ""))
        self._is_text = 'string="true"' in attributes
        self._held = self._held[start + len(end) :]
        self._step = self._before_value if style.value and end != style.value else self._in_value
        self._value, self._until = [], MarkerSearch(self._value_ends)
        return True

    def _before_value(self) -> bool:
        """State after a parameter's name, where the value's tag may be missing."""
        style = self._style
        self._held = self._held.lstrip()
        tags = (style.value, style.parameter_name_end, *self._tags)
        if any(len(self._held) < len(tag) and tag.startswith(self._held) for tag in tags):
            return False
        if self._held.startswith(style.parameter_name_end):
            self._held = self._held[len(style.parameter_name_end) :]
            return True
        self._step = self._in_call if self._held.startswith(self._tags) else self._in_value
        self._held = self._held.removeprefix(style.value)
        return True

    def _in_value(self) -> bool:
        found = self._until.push(self._held)
        self._held = ""
        if found is None:
            return False
        text, self._end, self._held = found
        self._value.append(text)
        is_parameter = self._end == self._style.parameter
        self._step = self._maybe_next if is_parameter else self._maybe_end
        return True

    def _maybe_end(self) -> bool:
        """State after a marker that ends a value only if the call continues or ends after it."""
        followers = self._followers[self._end]
        rest = self._held.lstrip()
        if rest.startswith(followers) or len(self._held) > MAX_HEAD + len(rest):
            if self._end != self._style.parameter_end:
                self._held = self._end + self._held
            self._end_value()
        elif len(rest) < MAX_HEAD and any(tag.startswith(rest) for tag in followers):
            return False
        else:
            self._continue_value()
        return True

    def _continue_value(self) -> None:
        self._value.append(self._end)
        self._until, self._step = MarkerSearch(self._value_ends), self._in_value

    def _maybe_next(self) -> bool:
        """State after a marker that ends a value only if it starts a known parameter's tag."""
        name, end, _ = self._held.partition(self._style.parameter_name_end)
        if not end and len(name) <= MAX_HEAD:
            return False
        if end and self._parameters.has(_attribute(name)[0]):
            self._held = self._style.parameter + self._held
            self._end_value()
            return True
        self._continue_value()
        return True

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._style.trims_line_ends:
            text = text.removeprefix("\n").removesuffix("\n")
        self._arguments.append(self._parameters.add(self._key, text, is_text=self._is_text))
        self._step = self._in_call


def _attribute(header: str) -> tuple[str, str]:
    """Return the name in the head of a tag, and its attributes."""
    begin = header.strip()
    if begin.startswith('"'):
        name, _, rest = begin[1:].partition('"')
        return name, rest
    return begin, ""
