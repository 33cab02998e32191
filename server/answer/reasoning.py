"""Parsing of reasoning that a model writes between tags before its answer."""

from collections.abc import Sequence

import msgspec

from server.text.markers import MAX_HEAD, certain_length


class ReasoningTags(msgspec.Struct, frozen=True):
    """A model's reasoning tags.

    With `implied` an answer starts inside the reasoning even without the start tag, because the
    prompt ends with the tag or the model was trained to always reason. `end_before_calls` is the
    end tag before tool calls, for models that use a different one there.
    """

    start: str
    end: str
    implied: bool = False
    end_before_calls: str = ""

    def opening(self, prompt: str, *, continues: bool) -> bool | None:
        """Return whether an answer starts inside the reasoning; None if reasoning is over.

        Args:
            prompt: the rendered prompt, which may have opened or closed the reasoning.
            continues: whether the answer continues the last message of the prompt.
        """
        if continues:
            return True if prompt.rfind(self.start) > prompt.rfind(self.end) else None
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return None
        return self.implied or tail.endswith(self.start)


THINK = ReasoningTags("<think>", "</think>")

REASONING_FORMATS = {
    "qwen3": THINK,
    "glm45": THINK,
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:"),
    "deepseek_r1": ReasoningTags("<think>", "</think>", implied=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>", implied=True),
    "command_r": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ReasoningTags("<|channel>thought\n", "<channel|>"),
}
"""Formats by name in `--reasoning-parser`, except ones that need more settings."""


class ReasoningReader:
    """Splits an answer into reasoning and what follows it.

    Line ends next to the tags are dropped: templates add them around both parts.
    """

    def __init__(
        self, tags: ReasoningTags, *, inside: bool, call_starts: Sequence[str] = ()
    ) -> None:
        """Read one answer, which has no reasoning if it starts with one of `call_starts`."""
        self._tags = tags
        self._call_starts = call_starts
        self._inside = inside
        self._may_open = True
        """Whether only whitespace has come, so that a start tag here counts."""
        self._at_edge = False
        """Whether a tag came last, so that line ends are dropped."""
        self._held = ""
        self._line_ends: list[str] = []
        """Trailing line ends, which belong to the reasoning if it continues."""
        self.over = False
        """Whether the reasoning has ended: all further text is content."""

    @property
    def reasoned(self) -> bool:
        """Whether there has been any reasoning."""
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the certain parts of the reasoning and of what follows it."""
        if self.over:
            return "", self._content(text)
        self._held += text
        if self._may_open and not self._open():
            return "", ""
        if not self._inside:
            self.over = True
            held, self._held = self._held, ""
            return "", self._content(held)
        return self._reasoning()

    def finish(self) -> tuple[str, str]:
        """End of input: return the text held back; unclosed reasoning stays reasoning."""
        held, self._held = self._held, ""
        return (
            (self._joined(held.rstrip("\n")), "") if self._inside and not self.over else ("", held)
        )

    def _joined(self, text: str) -> str:
        if not text:
            return ""
        held, self._line_ends = self._line_ends, []
        return "".join([*held, text])

    def _open(self) -> bool:
        """Consume a start tag; return whether it is certain if there is one."""
        start, begin = self._tags.start, self._held.lstrip()
        if len(self._held) <= MAX_HEAD and any(
            len(begin) < len(marker) and marker.startswith(begin)
            for marker in (start, self._tags.end, *self._call_starts)
        ):
            return False
        self._may_open = False
        if not self._inside and begin.startswith(self._tags.end):
            self._held = begin[len(self._tags.end) :].lstrip("\n")
            self._at_edge = not self._held
            return True
        if begin.startswith(tuple(self._call_starts)):
            self._inside = False
        elif begin.startswith(start):
            self._inside = True
            self._held = begin[len(start) :]
        self._at_edge = self._inside
        return True

    def _reasoning(self) -> tuple[str, str]:
        if self._at_edge:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return "", ""
            self._at_edge = False
        before, end, after = self._held.partition(self._tags.end)
        if end:
            self._held = ""
            self.over = self._at_edge = True
            return self._joined(before.rstrip("\n")), self._content(after)
        length = certain_length(before, [self._tags.end])
        text, self._held = before[:length], before[length:]
        certain = text.rstrip("\n")
        shown = self._joined(certain)
        if len(certain) < len(text):
            self._line_ends.append(text[len(certain) :])
        return shown, ""

    def _content(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip("\n")
            self._at_edge = not text
        return text
