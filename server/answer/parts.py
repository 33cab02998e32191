"""The parts of an answer: reasoning, content and tool calls, in the order of the text.

Parsers emit parts incrementally. How the text was split into pieces affects how parts are split,
but never their concatenation.
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """A piece of the content."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Start of the answer's `index`-th tool call; its arguments follow."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = ReasoningText | ContentText | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Incremental parser of an answer's text; a state machine without I/O."""

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        ...

    def finish(self) -> list[Part]:
        """End of input: return the parts held back."""
        ...


class Call(msgspec.Struct):
    """A complete tool call; `arguments` is JSON if the model wrote valid JSON."""

    name: str
    arguments: str


class Message(msgspec.Struct):
    """A complete answer; None for absent parts."""

    reasoning: str | None
    content: str | None
    calls: list[Call]


def whole_message(parts: Iterable[Part]) -> Message:
    """Join an answer's parts to a message."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case ReasoningText(text):
                reasoning.append(text)
            case ContentText(text):
                content.append(text)
            case CallBegin(_, name):
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [Call(name, "".join(text)) for name, text in zip(names, arguments, strict=True)]
    return Message("".join(reasoning) or None, "".join(content) or None, calls)
