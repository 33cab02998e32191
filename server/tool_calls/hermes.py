"""Calls as JSON objects between tags, as Hermes and Qwen models write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import split_at
from server.tool_calls.call_object import CallObject

START, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Reads any number of tagged calls with content around them.

    What stands between the tags and is no call stays content, tags included. An end tag may be
    missing.
    """

    def __init__(
        self, functions: Sequence[FunctionDefinition], start: str = START, end: str = END
    ) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._start, self._end = start, end
        self._held = ""
        self._object: CallObject | None = None
        self._begun = False
        self._behind_call = False
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        self._held += text
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is."""
        if self._behind_call:
            return []
        left = self._held
        if self._object is not None:
            left = "" if self._begun else self._start + self._object.raw
        return [ContentText(left)] if left else []

    def _advance(self, parts: list[Part]) -> bool:
        """Take the next piece off the held text; return whether there may be another."""
        if self._object is not None:
            return self._in_call(self._object, parts)
        if self._behind_call:
            return self._after_call()
        before, tag, self._held = split_at(self._held, [self._start])
        if tag:
            self._object, self._begun = CallObject(), False
        if before:
            parts.append(ContentText(before))
        return bool(tag)

    def _in_call(self, call: CallObject, parts: list[Part]) -> bool:
        self._held = call.push(self._held)
        if call.name is not None:
            if not self._begun:
                self._begun = True
                parts.append(CallBegin(self._count, call.name))
            if arguments := call.take_arguments():
                parts.append(CallArguments(self._count, arguments))
        if call.state == "open":
            return False
        self._object = None
        if self._begun:
            self._count += 1
            self._behind_call = True
        else:
            parts.append(ContentText(self._start + call.raw))
        return True

    def _after_call(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(self._end):
            self._held = self._held[len(self._end) :]
        elif self._end.startswith(self._held):
            return False
        self._behind_call = False
        return True
