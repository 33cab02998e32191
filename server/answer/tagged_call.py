"""A call whose parameters stand between tags, as many models write them instead of JSON.

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
from server.text.markers import MAX_HEAD, Until, certain_length, find_first

_NAME = re.compile(r"\s*([\w.:/-]+)\s*")
_NAME_END = re.compile(r"[>\n<]")


class TaggedStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of a call.

    A name ends with `>`, and quotes around it are left out; attributes may follow it. Without a
    tag before the name, the name ends where the next tag begins.
    """

    call: str = ""
    call_end: str = ""
    parameter: str
    parameter_name_end: str = ">"
    value: str = ""
    """Stands before a value where it does not follow the parameter's tag."""
    parameter_end: str
    starts: tuple[str, ...] = ()
    """What stands before calls: it ends a call whose own end is missing."""
    around: tuple[str, ...] = ()
    """What stands behind calls: so does it."""
    ends_values: bool = True
    """The end of a call ends a value whose own end is missing."""
    trims_line_ends: bool = True
    """One line end at each side of a value is no part of it."""


class TaggedCall(CallBody):
    """Reads one call; its arguments come parameter by parameter."""

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
        """What has to follow what ends a value: values may hold such a text themselves."""
        ends = ends if style.ends_values else ()
        self._value_ends = (style.parameter_end, style.parameter, *ends)
        self._held = ""
        self._step: Callable[[], bool] = self._head
        self._parameters = Parameters(functions, "")
        self._key, self._is_text = "", False
        self._value: list[str] = []
        """What has come of a value."""
        self._end = ""
        """What may have ended the value."""
        self._until = Until(self._value_ends)
        self._json = JsonValue("{")
        self._is_empty = True
        """Nothing but blanks has come since the name."""
        self._closing = "{}"
        """What the end of the call adds to the arguments; empty behind arguments in one piece."""

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
        """End: a value that may have ended has; a call that has not ended stays as it is."""
        if self._step == self._maybe_end:
            self._end_value()
            self._arguments += [] if self._end == self._style.parameter_end else ["}"]

    # Each step takes the next piece off the held text and returns whether there may be another.

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
        """Return the name in the call's tag and where that ends, "" if this is none."""
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
        """Return the name up to the next tag, "" if there is none."""
        named = _NAME.match(self._held)
        if named is None:
            return None if not self._held.strip() else ("", 0)
        rest = self._held[named.end() :]
        if rest.startswith(self._tags):
            return named[1], named.end()
        return None if any(tag.startswith(rest) for tag in self._tags) else ("", 0)

    def _in_call(self) -> bool:
        """Between parameters: what stands there besides tags means nothing."""
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
        """Arguments in one piece."""
        end = self._json.take(self._held, 0)
        self._arguments.append(self._held[:end])
        self._held = self._held[end:]
        if self._json.done:
            self._closing, self._is_empty, self._step = "", False, self._in_call
        return self._json.done

    def _in_parameter(self) -> bool:
        """In a parameter's name. A line end ends it, too, if a value follows at once."""
        style = self._style
        ends = (style.parameter_name_end, style.value or "\n")
        found = find_first(self._held, ends)
        if (len(self._held) if found is None else found[0]) > MAX_HEAD:
            self._step = self._in_call  # no parameter: like all else between tags
            return True
        if found is None:
            return False
        start, end = found
        self._key, attributes = _attribute(self._held[:start].replace(style.parameter, ""))
        self._is_text = 'string="true"' in attributes
        self._held = self._held[start + len(end) :]
        self._step = self._before_value if style.value and end != style.value else self._in_value
        self._value, self._until = [], Until(self._value_ends)
        return True

    def _before_value(self) -> bool:
        """Behind a parameter's name, where the tag of the value may be missing."""
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
        """Behind what ends a value only if the call goes on, or ends, behind it."""
        followers = self._followers[self._end]
        rest = self._held.lstrip()
        if rest.startswith(followers) or len(self._held) > MAX_HEAD + len(rest):
            if self._end != self._style.parameter_end:
                self._held = self._end + self._held
            self._end_value()
        elif len(rest) < MAX_HEAD and any(tag.startswith(rest) for tag in followers):
            return False
        else:
            self._go_on()
        return True

    def _go_on(self) -> None:
        self._value.append(self._end)
        self._until, self._step = Until(self._value_ends), self._in_value

    def _maybe_next(self) -> bool:
        """Behind what ends a value only if it is the tag of another parameter."""
        name, end, _ = self._held.partition(self._style.parameter_name_end)
        if not end and len(name) <= MAX_HEAD:
            return False
        if end and self._parameters.has(_attribute(name)[0]):
            self._held = self._style.parameter + self._held
            self._end_value()
            return True
        self._go_on()
        return True

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._style.trims_line_ends:
            text = text.removeprefix("\n").removesuffix("\n")
        self._arguments.append(self._parameters.add(self._key, text, is_text=self._is_text))
        self._step = self._in_call


def _attribute(header: str) -> tuple[str, str]:
    """Return the name in the head of a tag, and the attributes behind it."""
    begin = header.strip()
    if begin.startswith('"'):
        name, _, rest = begin[1:].partition('"')
        return name, rest
    return begin, ""
