"""Calls as Granite 3 models write them: an array of JSON objects behind a marker.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
"""

from collections.abc import Sequence

from server.answer.parts import ContentText, Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import split_at
from server.tool_calls.call_list import CallListParser

MARKERS = ("<|tool_call|>", "<tool_call>")
"""Granite 3.0 and 3.2 onwards write the first, 3.1 writes the second."""


class MarkedListParser:
    """Reads content up to a marker, and what follows as a list of calls."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; a call may name others."""
        self._held = ""
        self._list: CallListParser | None = None

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        if self._list is not None:
            return self._list.push(text)
        self._held += text
        before, marker, self._held = split_at(self._held, MARKERS)
        parts: list[Part] = [ContentText(before)] if before else []
        if not marker:
            return parts
        self._list = CallListParser(" \t\r\n[],")
        return parts + self._list.push(self._held)

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is."""
        if self._list is not None:
            return self._list.finish()
        return [ContentText(self._held)] if self._held else []
