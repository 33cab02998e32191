"""Answers of gpt-oss models: messages in channels for reasoning, tool calls and content.

<|channel|>analysis<|message|>The user wants...<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json
<|message|>{"city": "Oslo"}<|call|>

without the line breaks. The prompt ends with `<|start|>assistant`. Source of the format: OpenAI's
description of its "harmony" response format.
"""

import re
from collections.abc import Sequence

from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.answer.reasoning import ReasoningTags
from server.schema.tools import FunctionDefinition
from server.text.markers import MAX_HEAD, certain_length, find_first

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

TAGS = ReasoningTags(
    f"{CHANNEL}analysis{MESSAGE}",
    f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
    end_before_calls=f"{END}{START}assistant",
)
"""Start of the reasoning, and the transition from it to a constrained answer."""

_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([A-Za-z0-9_.:-]+)")
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CLOSING = (END, CALL, RETURN)
_HEADERS = (START, CHANNEL, MESSAGE)


class HarmonyParser:
    """Parses messages by their headers. An answer that starts without a header is content."""

    def __init__(self, functions: Sequence[FunctionDefinition]) -> None:
        """`functions` are those that the request allows; calls may name others."""
        self._names = frozenset([function.name for function in functions])
        self._held = ""
        self._state = self._begin
        self._kind: type[ReasoningText | ContentText | CallArguments] = ContentText
        self._is_empty = False
        """Whether a call has started but has no argument text yet."""
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are now certain."""
        parts: list[Part] = []
        self._held += text
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End of input: return the text held back; a header without a message is dropped."""
        held = "" if self._state == self._header else self._held
        parts = [self._part(held)] if held else []
        return parts + self._ended()

    def _part(self, text: str) -> Part:
        if self._kind is CallArguments:
            self._is_empty = False
            return CallArguments(self._count - 1, text)
        return ReasoningText(text) if self._kind is ReasoningText else ContentText(text)

    def _ended(self) -> list[Part]:
        """End a message; a call without argument text gets empty arguments."""
        is_empty, self._is_empty = self._is_empty, False
        return [CallArguments(self._count - 1, "{}")] if is_empty else []

    # Each state consumes a piece of the held text and returns whether to continue.

    def _begin(self, parts: list[Part]) -> bool:
        """State at a possible message start: a header, or content without one."""
        begin = self._held.lstrip()
        may_be = len(self._held) <= MAX_HEAD
        if may_be and any(mark.startswith(begin) and mark != begin for mark in _HEADERS):
            return False
        self._state = self._header if begin.startswith(_HEADERS) else self._message
        return True

    def _header(self, parts: list[Part]) -> bool:
        header, mark, behind = self._held.partition(MESSAGE)
        if not mark and len(header) <= MAX_HEAD:
            return False
        self._state = self._message
        if not mark:  # headers are shorter: this is text
            parts.append(self._part(header[0]))
            self._held = header[1:]
            return True
        self._held, header = behind, header.rpartition(START)[2]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and (recipient[1] or recipient[2] in self._names):
            self._kind, self._is_empty = CallArguments, True
            parts.append(CallBegin(self._count, recipient[2]))
            self._count += 1
        elif channel is not None and channel[1] == "analysis":
            self._kind = ReasoningText
        else:
            self._kind = ContentText
        return True

    def _message(self, parts: list[Part]) -> bool:
        found = find_first(self._held, _ENDS)
        length = certain_length(self._held, _ENDS) if found is None else found[0]
        text, self._held = self._held[:length], self._held[length:]
        text = text.lstrip() if self._is_empty else text
        if text:
            parts.append(self._part(text))
        if found is None:
            return False
        parts += self._ended()
        self._held = self._held.removeprefix(found[1]) if found[1] in _CLOSING else self._held
        self._kind = ContentText
        self._state = self._begin
        return True
