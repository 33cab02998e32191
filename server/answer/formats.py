"""Formats of reasoning and tool calls in the served model's answers, chosen at startup."""

import logging
import re
from collections.abc import Callable
from typing import Literal

import msgspec

from engine.shared.plugins import instance_of, load_plugin
from server.answer.call_formats import CALL_FORMATS, CallFormat, detect
from server.answer.reasoning import REASONING_FORMATS, ReasoningTags
from server.config.answer import AnswerConfig
from server.text.sampling_defaults import Preset

logger = logging.getLogger(__name__)


class BadFormats(ValueError):
    """The settings contradict each other; the message names them."""


class AnswerFormats(msgspec.Struct, frozen=True):
    """How prompts present tools and how answers are parsed."""

    calls: CallFormat | None = None
    """Format of calls; None if unknown: then calls can only be enforced."""
    describes_tools: bool = False
    """Whether prompts describe tools and the call format, because the template shows no tools that
    the model would know how to call."""
    reasoning: ReasoningTags | None = None
    call_parser: str = "none"
    """Names of the two formats in the settings."""
    reasoning_parser: str = "none"
    auto_tool_choice: bool = True
    exclude_unused_tools: bool = False
    """Whether templates do not get the tools of requests that forbid calls."""
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    closes_objects: bool = False
    """Whether schema objects allow only listed properties, unless they specify otherwise."""


def answer_formats(
    config: AnswerConfig,
    template: str | None,
    *,
    shows_tools: bool = False,
    preset: Preset = Preset(),
    is_special: Callable[[str], bool] = lambda text: False,
) -> AnswerFormats:
    """Choose the formats according to the settings.

    Args:
        template: source of the model's chat template.
        shows_tools: whether the template renders tools.
        is_special: returns whether a text is a special token of the tokenizer.

    Raises:
        BadFormats: settings contradict each other.
        BadPlugin: a format comes from a plugin that cannot be loaded.
    """
    name, why = _call_format(config, template, shows_tools=shows_tools, preset=preset)
    calls = None if name is None else CALL_FORMATS.get(name)
    if name is not None and calls is None:
        calls = load_plugin("swell.tool_call_parsers", name, "--tool-call-parser", _checked_format)
    logger.info("tool calls: %s (%s)", name or "none", why)
    nameless = [] if calls is None else _nameless_tokens(calls, is_special)
    if calls is not None and nameless:
        logger.warning(
            "--tool-call-parser %s: calls are enforced as a JSON array, because grammars cannot "
            "name special tokens that are not of the form <NAME>: %s",
            name,
            ", ".join(nameless),
        )
        calls = msgspec.structs.replace(calls, syntax=None)
    describes_tools = why == FROM_PROMPTS
    reasoner, tags, why = _reasoning(config, template, calls, preset)
    logger.info("reasoning: %s (%s)", reasoner, why)
    return AnswerFormats(
        calls=calls,
        describes_tools=describes_tools,
        reasoning=tags,
        call_parser=name or "none",
        reasoning_parser=reasoner,
        auto_tool_choice=config.enable_auto_tool_choice,
        closes_objects=config.disable_additional_properties,
        exclude_unused_tools=config.exclude_tools_when_tool_choice_none,
        reasoning_field=config.reasoning_field,
    )


def _checked_format(found: object) -> CallFormat:
    format = instance_of(CallFormat)(found)
    for new_parser in filter(None, (format.parser, format.in_reasoning)):
        parser = new_parser([])
        parser.push("text")
        parser.finish()
    return format


def _checked_tags(found: object) -> ReasoningTags:
    tags = instance_of(ReasoningTags)(found)
    if not tags.start or not tags.end:
        raise ValueError("two texts are needed, the start and the end")
    return tags


_TOKEN_NAME = re.compile(r"<(?!\[)[^<>\s]+>")
"""Special tokens that llguidance's Lark syntax can name."""


def _nameless_tokens(format: CallFormat, is_special: Callable[[str], bool]) -> list[str]:
    """Return the special tokens of a format's syntax that no grammar can name."""
    texts = "" if format.syntax is None else "\n".join(msgspec.structs.astuple(format.syntax))
    return [
        marker
        for marker in format.markers
        if marker in texts and is_special(marker) and not _TOKEN_NAME.fullmatch(marker)
    ]


PRESET = "from the presets, presets.toml"
FROM_PROMPTS = "the chat template shows none, so prompts describe it"


def _call_format(
    config: AnswerConfig, template: str | None, *, shows_tools: bool, preset: Preset
) -> tuple[str | None, str]:
    """Return the name of the call format (None if unknown), and its origin."""
    configured = config.tool_call_parser
    if config.reasoning_parser == "openai_gptoss" and configured not in ("auto", "openai"):
        raise BadFormats("--reasoning-parser openai_gptoss needs --tool-call-parser openai")
    if config.reasoning_parser == "openai_gptoss":
        return "openai", "--reasoning-parser"
    if configured != "auto":
        return None if configured == "none" else configured, "--tool-call-parser"
    if template is None:
        return None, "the model has no chat template"
    shown = detect(template)
    if shown is not None:
        return shown, "from the chat template"
    if shows_tools and preset.tool_call_parser:
        return preset.tool_call_parser, PRESET
    return "hermes", FROM_PROMPTS


def _reasoning(
    config: AnswerConfig, template: str | None, calls: CallFormat | None, preset: Preset
) -> tuple[str, ReasoningTags | None, str]:
    """Return the name of the reasoning format, its tags, and its origin."""
    configured, tags = config.reasoning_parser, config.reasoning_tags
    if (configured == "tags") != bool(tags):
        raise BadFormats("--reasoning-tags and --reasoning-parser tags need each other")
    if calls is not None and calls.channels is not None:
        return "openai_gptoss", calls.channels, "from the format of tool calls"
    if configured == "tags":
        if len(tags) != 2 or not all(tags):
            raise BadFormats("--reasoning-tags: two texts are needed, the start and the end")
        return "tags", ReasoningTags(tags[0], tags[1]), "--reasoning-tags"
    if configured != "auto":
        flag, found = "--reasoning-parser", REASONING_FORMATS.get(configured)
        if found is None and configured not in ("none", "openai_gptoss"):
            found = load_plugin("swell.reasoning_parsers", configured, flag, _checked_tags)
        return configured, found, flag
    for name, known in REASONING_FORMATS.items():
        if known.end in (template or ""):
            return name, known, "from the chat template"
    if preset.reasoning_parser:
        return preset.reasoning_parser, REASONING_FORMATS[preset.reasoning_parser], PRESET
    return "none", None, "the chat template shows none"
