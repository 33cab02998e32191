"""What the answers to one request may consist of."""

from typing import Literal

import msgspec

from server.answer.call_formats import CallFormat
from server.answer.reader import AnswerReader
from server.answer.reasoning import ReasoningReader, ReasoningTags
from server.answer.tool_choice import ToolUse


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
        probe = None if format is None or tags is None else format.in_reasoning
        return AnswerReader(
            None if tags is None else self._reasoning_reader(tags),
            None if format is None else format.parser(functions),
            calls_in_reasoning=None if probe is None else probe(functions),
            only_calls=tools.forced,
            parallel=tools.parallel,
            show_reasoning=self.show_reasoning,
            reasoning_end=self.reasoning_end,
        )

    def _reasoning_reader(self, tags: ReasoningTags) -> ReasoningReader:
        format = self.tools.format if self.may_call_at_once else None
        starts = () if format is None else format.starts
        return ReasoningReader(tags, inside=self.begins_inside, call_starts=starts)

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
