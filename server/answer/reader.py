"""An answer's text as a message: first reasoning, then content and tool calls."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec

from server.answer.call_formats import CallFormat
from server.answer.json_value import is_object
from server.answer.parts import (
    AnswerParser,
    CallArguments,
    CallBegin,
    ContentText,
    Part,
    ReasoningText,
)
from server.answer.reasoning import ReasoningReader, ReasoningTags
from server.answer.tool_choice import ToolUse

_MOST_AT_ONCE = 512
"""Characters that are taken apart at once: parsers look again at what stands behind each tag."""


class AnswerReader:
    """Composes the parsers of reasoning and of tool calls.

    Whitespace between content and tool calls belongs to the format of the calls and is left out.

    Args:
        reasoning: splits off the reasoning; None if there is none.
        calls: finds tool calls in the rest; None if none are allowed.
        calls_in_reasoning: finds the calls in reasoning, which count if nothing follows it.
        only_calls: the answer is held to calls: of one that is cut off, its begin is no content.
        parallel: whether more than the first call is shown.
        show_reasoning: whether reasoning is part of the message.
        reasoning_end: the token that ends the reasoning; None if several do.
    """

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        calls: AnswerParser | None,
        *,
        calls_in_reasoning: AnswerParser | None = None,
        only_calls: bool = False,
        parallel: bool = True,
        show_reasoning: bool = True,
        reasoning_end: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._probe = calls_in_reasoning
        self._probed: list[Part] = []
        """Calls in the reasoning, and what comes after them."""
        self._unshown: list[str] = []
        """Reasoning that may be, or be followed by, a call."""
        self._certain = 0
        """Characters of it that are no call."""
        self._only_calls = only_calls
        self._parallel = parallel
        self._show_reasoning = show_reasoning
        self._reasoning_end = reasoning_end
        """Until it has come."""
        self._reasoning_tokens = 0
        self._in_channels = 0
        """Tokens that came with reasoning that the parser of calls found."""
        self._whitespace: list[str] = []
        """Whitespace that came last: content, unless a call follows or has come before."""
        self._arguments: list[list[str]] = []

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return len(self._arguments)

    @property
    def unreadable_calls(self) -> list[int]:
        """The calls whose arguments, as far as they have come, are no JSON object."""
        return [i for i, text in enumerate(self._arguments) if not is_object("".join(text))]

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens that were pushed were for reasoning."""
        reasoned = self._reasoning is not None and self._reasoning.reasoned
        return self._reasoning_tokens if reasoned else self._in_channels

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Add text and the tokens behind it; return the parts that are now certain."""
        if self._reasoning_end is not None:
            count = len(token_ids)
            if self._reasoning_end in token_ids:
                count = token_ids.index(self._reasoning_end) + 1
                self._reasoning_end = None
            self._reasoning_tokens += count
        pieces = [
            text[start : start + _MOST_AT_ONCE] for start in range(0, len(text), _MOST_AT_ONCE)
        ]
        parts = [part for piece in pieces for part in self._read(piece)]
        if self._reasoning is None and any(isinstance(part, ReasoningText) for part in parts):
            self._in_channels += len(token_ids)
        return parts

    def finish(self) -> list[Part]:
        """End: return what was held back."""
        thought, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = self._thought(thought) + self._said(said) + self._unclosed()
        if self._calls is not None:
            parts += self._shown(self._calls.finish())
        if self._whitespace and not self.num_calls and not self._only_calls:
            parts.append(ContentText("".join(self._whitespace)))
        return parts

    def _read(self, text: str) -> list[Part]:
        if self._reasoning is None:
            return self._said(text)
        thought, said = self._reasoning.push(text)
        parts = self._thought(thought)
        if self._probe is not None and said.strip():  # the calls were thoughts
            self._probe = None
            parts += self._reasoned("".join(self._unshown))
        return parts + self._said(said)

    def _reasoned(self, text: str) -> list[Part]:
        return [ReasoningText(text)] if text and self._show_reasoning else []

    def _thought(self, text: str) -> list[Part]:
        if self._probe is None or not text:
            return self._reasoned(text)
        self._unshown.append(text)
        return self._probe_result(self._probe.push(text))

    def _probe_result(self, parts: list[Part]) -> list[Part]:
        """Keep calls and what follows them; return the reasoning before them."""
        is_text = False
        for part in parts:
            if isinstance(part, ContentText) and not self._probed:
                self._certain += len(part.text)
                is_text |= not part.text.isspace()
            else:
                self._probed.append(part)
        if not is_text:
            return []
        unshown = "".join(self._unshown)
        shown = unshown[: self._certain].rstrip()
        self._unshown = [unshown[len(shown) :]]
        self._certain -= len(shown)
        return self._reasoned(shown)

    def _unclosed(self) -> list[Part]:
        """Return the end of reasoning that nothing followed: the calls in it count."""
        if self._probe is None:
            return []
        parts = self._probe_result(self._probe.finish())
        self._probe = None
        if not any(isinstance(part, CallBegin) for part in self._probed):
            return parts + self._reasoned("".join(self._unshown))
        for is_text, group in groupby(self._probed, lambda part: isinstance(part, ContentText)):
            if is_text:
                text = "".join([part.text for part in group if isinstance(part, ContentText)])
                parts += self._reasoned(text if text.strip() else "")
            else:
                parts += self._shown([*group])
        return parts

    def _said(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._calls is None:
            return [ContentText(text)]
        return self._shown(self._calls.push(text))

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            match part:
                case ReasoningText(text):
                    shown += self._reasoned(text)
                case ContentText(text):
                    shown += self._content(text) if not self._only_calls else []
                case CallBegin():
                    self._whitespace = []
                    if self._parallel or part.index == 0:
                        self._arguments.append([])
                        shown.append(part)
                case CallArguments(index, text) if index < self.num_calls:
                    self._arguments[index].append(text)
                    shown.append(part)
        return shown

    def _content(self, text: str) -> list[Part]:
        certain = text.rstrip()
        held, whitespace = self._whitespace, text[len(certain) :]
        if not certain:
            if whitespace:
                held.append(whitespace)
            return []
        self._whitespace = [whitespace] if whitespace else []
        return [ContentText("".join([*held, certain]))]


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers to a request are taken apart."""

    tools: ToolUse = ToolUse()
    reasoning: ReasoningTags | None = None
    """None: the answers hold no reasoning."""
    reasoning_end: int | None = None
    """The end tag's token; None if it is spelled by several."""
    channels: CallFormat | None = None
    """Tells reasoning from the rest in answers without tools too."""
    begins_inside: bool = False
    """The answers begin inside the reasoning."""
    may_call_at_once: bool = False
    """An answer that begins with a call has no reasoning, wherever it begins."""
    show_reasoning: bool = True
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """The name by which it is shown."""
    echo: str = ""
    """What each answer repeats before it begins."""

    def reader(self) -> AnswerReader | None:
        """Return a reader for one answer, or None if all of the answer is content."""
        tools, tags, format = self.tools, self.reasoning, self._format
        if tags is None and format is None:
            return None
        if format is not None and format.channels is not None:
            tags = None  # the parser does it
        functions = [*tools.functions.values()]
        starts = tools.format.starts if tools.format is not None and self.may_call_at_once else ()
        probe = None if format is None or tags is None else format.in_reasoning
        reasoning = None
        if tags is not None:
            reasoning = ReasoningReader(tags, inside=self.begins_inside, call_starts=starts)
        return AnswerReader(
            reasoning,
            None if format is None else format.parser(functions),
            calls_in_reasoning=None if probe is None else probe(functions),
            only_calls=tools.forced,
            parallel=tools.parallel,
            show_reasoning=self.show_reasoning,
            reasoning_end=self.reasoning_end,
        )

    def new_call_id(self) -> str:
        """Return a name for a call of an answer."""
        assert self.tools.format is not None, "nothing else finds calls"
        return self.tools.format.new_id()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that readers have to see even if they are special tokens."""
        calls = self._format.markers if self._format is not None else ()
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning is not None else ()
        return calls + tags

    @property
    def _format(self) -> CallFormat | None:
        return self.tools.format or self.channels
