"""Incremental parsing of an answer into a message: reasoning, then content and tool calls."""

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

_MAX_PARSED_CHARACTERS = 512
"""Maximum characters parsed at once: parsers rescan what follows each tag."""


class AnswerReader:
    """Combines the parsers of reasoning and of tool calls.

    Whitespace between content and tool calls belongs to the call format and is dropped.

    Args:
        reasoning: splits off the reasoning; None if there is none.
        calls: finds tool calls in the rest; None if none are allowed.
        calls_in_reasoning: finds calls in reasoning, which count if nothing follows it.
        only_calls: calls are enforced, so the start of a truncated one is not content.
        parallel: whether calls after the first are kept.
        show_reasoning: whether reasoning is part of the message.
        reasoning_end: the token that ends the reasoning; None if there are several.
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
        """Calls in the reasoning, and the parts after them."""
        self._unshown: list[str] = []
        """Reasoning held back because it may contain a call."""
        self._certain = 0
        """Number of characters of it that are certainly not a call."""
        self._only_calls = only_calls
        self._parallel = parallel
        self._show_reasoning = show_reasoning
        self._reasoning_end = reasoning_end
        """Set to None once it has occurred."""
        self._reasoning_tokens = 0
        self._in_channels = 0
        """Tokens of reasoning that the parser of calls separated."""
        self._whitespace: list[str] = []
        """Trailing whitespace: content unless a call follows or precedes it."""
        self._arguments: list[list[str]] = []

    @property
    def num_calls(self) -> int:
        """Number of tool calls started."""
        return len(self._arguments)

    @property
    def unreadable_calls(self) -> list[int]:
        """Indices of calls whose arguments so far are not a JSON object."""
        return [i for i, text in enumerate(self._arguments) if not is_object("".join(text))]

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens among those pushed."""
        reasoned = self._reasoning is not None and self._reasoning.reasoned
        return self._reasoning_tokens if reasoned else self._in_channels

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Add text and its tokens; return the parts that are now certain."""
        if self._reasoning_end is not None:
            count = len(token_ids)
            if self._reasoning_end in token_ids:
                count = token_ids.index(self._reasoning_end) + 1
                self._reasoning_end = None
            self._reasoning_tokens += count
        pieces = [
            text[start : start + _MAX_PARSED_CHARACTERS]
            for start in range(0, len(text), _MAX_PARSED_CHARACTERS)
        ]
        parts = [part for piece in pieces for part in self._read(piece)]
        if self._reasoning is None and any(isinstance(part, ReasoningText) for part in parts):
            self._in_channels += len(token_ids)
        return parts

    def finish(self) -> list[Part]:
        """End of input: return the parts held back."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = self._push_reasoning(reasoning) + self._push_answer(answer) + self._unclosed()
        if self._calls is not None:
            parts += self._shown(self._calls.finish())
        if self._whitespace and not self.num_calls and not self._only_calls:
            parts.append(ContentText("".join(self._whitespace)))
        return parts

    def _read(self, text: str) -> list[Part]:
        if self._reasoning is None:
            return self._push_answer(text)
        reasoning, answer = self._reasoning.push(text)
        parts = self._push_reasoning(reasoning)
        if self._probe is not None and answer.strip():  # the calls were part of the reasoning
            self._probe = None
            parts += self._reasoning_parts("".join(self._unshown))
        return parts + self._push_answer(answer)

    def _reasoning_parts(self, text: str) -> list[Part]:
        return [ReasoningText(text)] if text and self._show_reasoning else []

    def _push_reasoning(self, text: str) -> list[Part]:
        if self._probe is None or not text:
            return self._reasoning_parts(text)
        self._unshown.append(text)
        return self._probe_result(self._probe.push(text))

    def _probe_result(self, parts: list[Part]) -> list[Part]:
        """Store calls and the parts after them; return the reasoning before them."""
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
        return self._reasoning_parts(shown)

    def _unclosed(self) -> list[Part]:
        """Return the end of reasoning that nothing followed: its calls count."""
        if self._probe is None:
            return []
        parts = self._probe_result(self._probe.finish())
        self._probe = None
        if not any(isinstance(part, CallBegin) for part in self._probed):
            return parts + self._reasoning_parts("".join(self._unshown))
        for is_text, group in groupby(self._probed, lambda part: isinstance(part, ContentText)):
            if is_text:
                text = "".join([part.text for part in group if isinstance(part, ContentText)])
                parts += self._reasoning_parts(text if text.strip() else "")
            else:
                parts += self._shown([*group])
        return parts

    def _push_answer(self, text: str) -> list[Part]:
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
                    shown += self._reasoning_parts(text)
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
    """How the answers to a request are parsed."""

    tools: ToolUse = ToolUse()
    reasoning: ReasoningTags | None = None
    """None: the answers have no reasoning."""
    reasoning_end: int | None = None
    """The end tag's token; None if it consists of several."""
    channels: CallFormat | None = None
    """Separates reasoning from content even in answers without tools."""
    begins_inside: bool = False
    """Whether answers start inside the reasoning."""
    may_call_at_once: bool = False
    """Whether an answer that starts with a call has no reasoning, wherever it starts."""
    show_reasoning: bool = True
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """Field name for reasoning in responses."""
    echo: str = ""
    """Text that precedes each answer."""

    def reader(self) -> AnswerReader | None:
        """Return a parser for one answer, or None if the whole answer is content."""
        tools, tags, format = self.tools, self.reasoning, self._format
        if tags is None and format is None:
            return None
        if format is not None and format.channels is not None:
            tags = None  # handled by the parser of channels
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
        """Return a new ID for a call."""
        assert self.tools.format is not None, "nothing else finds calls"
        return self.tools.format.new_id()

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that parsers have to see even if they are special tokens."""
        calls = self._format.markers if self._format is not None else ()
        tags = (self.reasoning.start, self.reasoning.end) if self.reasoning is not None else ()
        return calls + tags

    @property
    def _format(self) -> CallFormat | None:
        return self.tools.format or self.channels
