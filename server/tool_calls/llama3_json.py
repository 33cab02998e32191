"""Calls as Llama 3 models write them: JSON objects with semicolons between them.

<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

from collections.abc import Sequence

from server.answer.parts import Part
from server.api.shared.tools import FunctionDefinition
from server.text.markers import MAX_HEAD
from server.tool_calls.call_list import CallListParser

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser:
    """Reads an answer that begins with a call, with or without the tag before it.

    Since nothing else marks a call, only objects that name one of the request's tools and have
    arguments are calls; every other answer is content.
    """

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows."""
        names = frozenset([function.name for function in functions])
        self._calls = CallListParser(
            " \t\r\n;", accepts=names.__contains__, arguments_required=True
        )
        self._held: str | None = ""
        """The answer so far while it may still be the tag; None once that is decided."""

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        if self._held is None:
            return self._calls.push(text)
        self._held += text
        begin = self._held.lstrip()
        is_short = len(begin) < len(PYTHON_TAG) and len(self._held) <= MAX_HEAD
        if is_short and PYTHON_TAG.startswith(begin):
            return []
        text, self._held = self._held, None
        if begin.startswith(PYTHON_TAG):
            text = begin[len(PYTHON_TAG) :]
        return self._calls.push(text) if text else []

    def finish(self) -> list[Part]:
        """End: return what was held back as the content that it is."""
        parts = self._calls.push(self._held) if self._held else []
        return parts + self._calls.finish()
