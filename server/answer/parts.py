"""What an answer consists of: reasoning, content and tool calls, in the order of the text.

Parsers give parts as the text comes. How the text was cut into pieces changes where a part is
cut, never what the parts add up to.
"""

from collections.abc import Iterable
from typing import Protocol

import msgspec


class ReasoningText(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """More of what the model says."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call, the `index`-th of the answer, whose arguments follow."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = ReasoningText | ContentText | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Takes an answer's text apart; a state machine without I/O."""

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        ...

    def finish(self) -> list[Part]:
        """End: return what was held back."""
        ...


class Call(msgspec.Struct):
    """A whole tool call; `arguments` is JSON if the model wrote JSON."""

    name: str
    arguments: str


class Message(msgspec.Struct):
    """A whole answer; None where it has no such part."""

    reasoning: str | None
    content: str | None
    calls: list[Call]


def whole_message(parts: Iterable[Part]) -> Message:
    """Return the sum of an answer's parts."""
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
