"""How the served model writes reasoning and tool calls: chosen once, when a front end starts."""

from typing import Literal

import msgspec

from server.answer.config import AnswerConfig
from server.answer.reasoning import REASONING_FORMATS, ReasoningTags
from server.tool_calls.formats import CALL_FORMATS, CallFormat, detect


class BadFormats(ValueError):
    """The settings contradict each other; the message names them."""


class AnswerFormats(msgspec.Struct, frozen=True):
    """What requests find when they ask for tools, and what their answers are searched for."""

    calls: CallFormat | None = None
    """None: the model has no known format, so that calls can only be enforced."""
    reasoning: ReasoningTags | None = None
    auto_tool_choice: bool = True
    exclude_unused_tools: bool = False
    """Templates do not get the tools of requests that must not call any."""
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"


def answer_formats(config: AnswerConfig, template: str | None) -> AnswerFormats:
    """Return what the settings say; `template` is the source of the model's chat template.

    Raises:
        BadFormats: settings contradict each other.
    """
    match config.tool_call_parser:
        case "auto":
            calls = detect(template) if template else None
        case "none":
            calls = None
        case name:
            calls = CALL_FORMATS[name]
    return AnswerFormats(
        calls,
        _reasoning(config, template or ""),
        config.enable_auto_tool_choice,
        config.exclude_tools_when_tool_choice_none,
        config.reasoning_field,
    )


def _reasoning(config: AnswerConfig, template: str) -> ReasoningTags | None:
    tags = config.reasoning_tags
    if (config.reasoning_parser == "tags") != bool(tags):
        raise BadFormats("--reasoning-tags and --reasoning-parser tags need each other")
    match config.reasoning_parser:
        case None:
            return None
        case "tags":
            if len(tags) != 2 or not all(tags):
                raise BadFormats("--reasoning-tags: two texts are needed, the start and the end")
            return ReasoningTags(tags[0], tags[1])
        case "auto":
            known = REASONING_FORMATS.values()
            return next((each for each in known if each.end in template), None)
        case name:
            return REASONING_FORMATS[name]
