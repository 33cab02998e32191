"""Calls as Qwen3-Coder models write them: parameters between tags instead of JSON.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

import re
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD, Until, certain_length, find_first, split_at
from server.tool_calls.parameters import Parameters

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_VALUE_ENDS = (PARAMETER_END, FUNCTION_END, END)
_TAGS_IN_CALL = (PARAMETER, FUNCTION_END, END)


class Qwen3CoderParser:
    """Reads any number of calls with content around them.

    Arguments come parameter by parameter; `Parameters` says what becomes of their values.
    """

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._functions = functions
        self._held = ""
        self._state = self._content
        self._parameters = Parameters(functions, "")
        self._key = ""
        self._value = Until(_VALUE_ENDS)
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
        if self._state == self._content:
            return [ContentText(self._held)] if self._held else []
        if self._state == self._name:
            return [ContentText(START + self._held)]
        return []

    # Each state takes the next piece off the held text and returns whether there may be another.

    def _content(self, parts: list[Part]) -> bool:
        before, tag, self._held = split_at(self._held, [START])
        if tag:
            self._state = self._name
        if before:
            parts.append(ContentText(before))
        return bool(tag)

    def _name(self, parts: list[Part]) -> bool:
        begin = self._held.lstrip()
        may_be = len(self._held) <= MAX_HEAD
        if begin.startswith(FUNCTION):
            match = re.match(r"([^<>\n]*)(>|[<\n])", begin[len(FUNCTION) :])
            if match is None and may_be:
                return False
            if match is not None and match[2] == ">" and match[1].strip():
                self._begin_call(match[1].strip(), parts)
                self._held = begin[len(FUNCTION) + match.end() :]
                return True
        elif may_be and FUNCTION.startswith(begin):
            return False
        self._state = self._content
        parts.append(ContentText(START))
        return True

    def _begin_call(self, name: str, parts: list[Part]) -> None:
        self._parameters = Parameters(self._functions, name)
        self._state = self._in_call
        parts += [CallBegin(self._count, name), CallArguments(self._count, "{")]

    def _in_call(self, parts: list[Part]) -> bool:
        """Between parameters: what stands there besides tags means nothing."""
        found = find_first(self._held, _TAGS_IN_CALL)
        if found is None:
            self._held = self._held[certain_length(self._held, _TAGS_IN_CALL) :]
            return False
        start, tag = found
        behind = start + len(tag)
        if tag == PARAMETER:
            key, bracket, rest = self._held[behind:].partition(">")
            if not bracket and len(key) <= MAX_HEAD:
                self._held = self._held[start:]
                return False
            if not bracket:  # no parameter: like all else between tags
                self._held = key
                return True
            self._key, self._held, self._state = key.strip(), rest, self._in_value
            self._value = Until(_VALUE_ENDS)
            return True
        parts.append(CallArguments(self._count, "}"))
        self._count += 1
        self._held = self._held[behind:]
        self._state = self._content if tag == END else self._behind_call
        return True

    def _in_value(self, parts: list[Part]) -> bool:
        found = self._value.push(self._held)
        self._held = ""
        if found is None:
            return False
        text, tag, behind = found
        self._held = behind if tag == PARAMETER_END else tag + behind
        pair = self._parameters.add(self._key, text.removeprefix("\n").removesuffix("\n"))
        parts.append(CallArguments(self._count, pair))
        self._state = self._in_call
        return True

    def _behind_call(self, parts: list[Part]) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(END):
            self._held = self._held[len(END) :]
        elif END.startswith(self._held):
            return False
        self._state = self._content
        return True
