"""From the parts of an answer to output items, and to the events that tell how they grow."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import msgspec
from msgspec import UNSET

from server.answer.json_value import is_object
from server.answer.parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from server.api.chat.schema import ChatLogprob
from server.api.responses import events
from server.api.responses.events import ResponseEvent
from server.api.responses.items import (
    ItemStatus,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputLocalShellCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputToolSearchCall,
    ReasoningTextPart,
    ShellAction,
)
from server.api.responses.tools import OfferedTool


class _Place(TypedDict):
    item_id: str
    output_index: int


ScoredPart = tuple[Part, list[ChatLogprob]]
"""A part of an answer with the log probabilities of its tokens, if they are shown."""


class _CustomArguments(msgspec.Struct):
    """Arguments of the function that stands for a custom tool."""

    input: str


class _ShellArguments(msgspec.Struct):
    """Arguments of the function that stands for the client's shell."""

    command: list[str]
    timeout_ms: int | None = None
    working_directory: str | None = None

    def action(self) -> ShellAction:
        return ShellAction(self.command, self.timeout_ms, self.working_directory)


class OutputBuilder:
    """Builds the output of one response; a state machine without I/O.

    One item is open at a time.
    """

    def __init__(
        self, suffix: str, new_call_id: Callable[[], str], tools: Mapping[str, OfferedTool]
    ) -> None:
        """`suffix` makes the ids of items unique; `tools` are found by their functions' names."""
        self._suffix = suffix
        self._tools = tools
        self._new_call_id = new_call_id
        self._open: OutputItem | None = None
        self._text: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self.output: list[OutputItem] = []

    def push(self, part: Part, logprobs: list[ChatLogprob] | None = None) -> list[ResponseEvent]:
        """Add a part, with the log probabilities of its tokens; return what there is to tell."""
        match part:
            case ReasoningText(text):
                return self._add_reasoning(text)
            case ContentText(text):
                return self._add_content(text, logprobs or [])
            case CallBegin(_, name):
                return self._switch(self._call(name))
            case CallArguments(_, text):
                self._text.append(text)
                if not isinstance(self._open, OutputFunctionCall):
                    return []  # it is shown in another form, once it is complete
                return [events.ArgumentsDelta(**self._place(), delta=text)]

    def close(self, parts: Sequence[ScoredPart], status: ItemStatus) -> list[ResponseEvent]:
        """Add the last parts and end, with an empty message if there is nothing else.

        Returns what there is to tell.
        """
        told = [event for part, scores in parts for event in self.push(part, scores)]
        if not self.output:
            told += self.push(ContentText(""))
        return told + self.finish(status)

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """End the item that is open, if one is; return what there is to tell."""
        item = self._open
        if item is None:
            return []
        text, self._text = "".join(self._text), []
        place = self._place()
        told: list[ResponseEvent]
        part: OutputText | ReasoningTextPart
        match item:
            case OutputMessage():
                logprobs, self._logprobs = self._logprobs, []
                part = OutputText(text, logprobs=logprobs)
                item.content = [part]
                told = [
                    events.TextDone(**place, text=text, logprobs=logprobs),
                    events.ContentPartDone(**place, part=part),
                ]
            case OutputReasoning():
                part = ReasoningTextPart(text)
                item.content = [part]
                told = [
                    events.ReasoningTextDone(**place, text=text),
                    events.ContentPartDone(**place, part=part),
                ]
            case OutputFunctionCall():
                item.arguments = text
                status = status if is_object(text) else "incomplete"
                told = [events.ArgumentsDone(**place, name=item.name, arguments=text)]
            case OutputCustomToolCall():
                item.input = _custom_input(text)
                told = [
                    events.CustomInputDelta(**place, delta=item.input),
                    events.CustomInputDone(**place, input=item.input),
                ]
            case OutputLocalShellCall():
                try:
                    item.action = msgspec.json.decode(text, type=_ShellArguments).action()
                except (msgspec.DecodeError, UnicodeEncodeError):
                    status = "incomplete"
                told = []
            case OutputToolSearchCall():
                status = status if is_object(text) else "incomplete"
                item.arguments = msgspec.json.decode(text) if is_object(text) else {}
                told = []
        item.status = status
        self._open = None
        return [*told, events.OutputItemDone(output_index=place["output_index"], item=item)]

    def _call(self, name: str) -> OutputItem:
        tool, call_id = self._tools.get(name), self._new_call_id()
        namespace = tool.namespace if tool is not None and tool.namespace is not None else UNSET
        if tool is not None and tool.name is not None:
            name = tool.name
        match None if tool is None else tool.kind:
            case "custom":
                return OutputCustomToolCall(
                    self._id("ctc"), "in_progress", call_id, name, "", namespace
                )
            case "local_shell":
                return OutputLocalShellCall(
                    self._id("lsh"), "in_progress", call_id, ShellAction([])
                )
            case "tool_search":
                return OutputToolSearchCall(self._id("tsc"), "in_progress", call_id, {})
            case _:
                return OutputFunctionCall(
                    self._id("fc"), "in_progress", call_id, name, "", namespace
                )

    def _add_reasoning(self, text: str) -> list[ResponseEvent]:
        told: list[ResponseEvent] = []
        if not isinstance(self._open, OutputReasoning):
            told = self._switch(OutputReasoning(self._id("rs"), "in_progress", []))
            told.append(events.ContentPartAdded(**self._place(), part=ReasoningTextPart("")))
        self._text.append(text)
        return [*told, events.ReasoningTextDelta(**self._place(), delta=text)]

    def _add_content(self, text: str, logprobs: list[ChatLogprob]) -> list[ResponseEvent]:
        told: list[ResponseEvent] = []
        if not isinstance(self._open, OutputMessage):
            told = self._switch(OutputMessage(self._id("msg"), "in_progress", []))
            told.append(events.ContentPartAdded(**self._place(), part=OutputText("")))
        self._text.append(text)
        self._logprobs += logprobs
        return [*told, events.TextDelta(**self._place(), delta=text, logprobs=logprobs)]

    def _switch(self, item: OutputItem) -> list[ResponseEvent]:
        told = self.finish("completed")
        self._open = item
        self.output.append(item)
        begun = msgspec.structs.replace(item)
        return [*told, events.OutputItemAdded(output_index=len(self.output) - 1, item=begun)]

    def _place(self) -> _Place:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.output) - 1}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.output)}"


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool, or what the model wrote if that is malformed."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.DecodeError, UnicodeEncodeError):
        return arguments
