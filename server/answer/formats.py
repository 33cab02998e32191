"""How the served model writes reasoning and tool calls: chosen once, when a front end starts."""

import logging
from typing import Literal

import msgspec

from server.answer.config import AnswerConfig
from server.answer.reasoning import REASONING_FORMATS, ReasoningTags
from server.tool_calls.formats import CALL_FORMATS, OF_FAMILY, CallFormat, detect

logger = logging.getLogger(__name__)


class BadFormats(ValueError):
    """The settings contradict each other; the message names them."""


class AnswerFormats(msgspec.Struct, frozen=True):
    """What requests find when they ask for tools, and what their answers are searched for."""

    calls: CallFormat | None = None
    """None: the model has no known format, so that calls can only be enforced."""
    tells_tools: bool = False
    """The template shows no tools that the model would know how to call: prompts tell of both."""
    reasoning: ReasoningTags | None = None
    auto_tool_choice: bool = True
    exclude_unused_tools: bool = False
    """Templates do not get the tools of requests that must not call any."""
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"


def answer_formats(
    config: AnswerConfig, template: str | None, *, shows_tools: bool = False, family: str = ""
) -> AnswerFormats:
    """Return what the settings say.

    Args:
        config: the settings.
        template: the source of the model's chat template.
        shows_tools: the template does something with tools.
        family: the `model_type` of the model's configuration.

    Raises:
        BadFormats: settings contradict each other.
    """
    name, why = _call_format(config, template, shows_tools=shows_tools, family=family)
    calls = None if name is None else CALL_FORMATS[name]
    logger.info("tool calls: %s (%s)", name or "none", why)
    reasoning = calls.channels if calls is not None else None
    return AnswerFormats(
        calls=calls,
        tells_tools=why == TOLD,
        reasoning=reasoning or _reasoning(config, template or ""),
        auto_tool_choice=config.enable_auto_tool_choice,
        exclude_unused_tools=config.exclude_tools_when_tool_choice_none,
        reasoning_field=config.reasoning_field,
    )


TOLD = "the chat template shows none, so that prompts tell of it"


def _call_format(
    config: AnswerConfig, template: str | None, *, shows_tools: bool, family: str
) -> tuple[str | None, str]:
    """Return the name of the format of calls, None without one, and where it is from."""
    asked = config.tool_call_parser
    if config.reasoning_parser == "openai_gptoss" and asked not in ("auto", "openai"):
        raise BadFormats("--reasoning-parser openai_gptoss needs --tool-call-parser openai")
    if config.reasoning_parser == "openai_gptoss":
        return "openai", "--reasoning-parser"
    if asked != "auto":
        return None if asked == "none" else asked, "--tool-call-parser"
    if template is None:
        return None, "the model has no chat template"
    shown = detect(template)
    if shown is not None:
        return shown, "from the chat template"
    if shows_tools and family in OF_FAMILY:
        return OF_FAMILY[family], f"the model is of the family {family}"
    return "hermes", TOLD


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
        case "openai_gptoss":
            return None  # what reads its calls reads its reasoning
        case name:
            return REASONING_FORMATS[name]
