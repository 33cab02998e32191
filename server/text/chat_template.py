"""Hugging Face chat templates: Jinja, compiled once, rendered in a sandbox."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.text.placeholders import content_parts

_END_OF_FINAL_MESSAGE = "\ue000end-of-final-message\ue001"
_PROBE = "\ue000system-message\ue001"
_SYSTEM = ("system", "developer")

RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


class TemplateFailed(ValueError):
    """The template rejected the conversation or failed on it; the message says why."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation and the other inputs of a template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool = False
    """Whether the prompt ends at the end of the last message's content."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] | None = None
    images: bool = False
    """Whether the texts contain image placeholders (`server.text.placeholders`)."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training targets: rendered as is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template with the variables that it always has.

    Args:
        variables: special tokens such as `bos_token`, and defaults of arguments.
        tool_use: template for conversations with tools, if the model has a separate one.

    Raises:
        ValueError: the template is not valid Jinja.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], tool_use: str | None = None
    ) -> None:
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error}") from error
        self.source = source if tool_use is None else f"{source}\n{tool_use}"
        self._variables = dict(variables)
        self._knows_developer = "developer" in source
        self.shows_tools = "tools" in self.source
        """Whether the template renders tools."""

    def render(self, *attempts: Rendering) -> str:
        """Return the prompt for the first form of a conversation that the template accepts.

        A `developer` turn is rendered as `system` if the template does not know the role. System
        and developer turns at the beginning are merged; later ones are merged into user turns if
        the template does not render them. Templates that do not render string contents get lists of
        parts; with images so do all templates that can read them.

        Raises:
            TemplateFailed: the template accepts none.
        """
        failure = TemplateFailed("there is nothing to render")
        for attempt in attempts:
            try:
                return self._rendered(attempt)
            except TemplateFailed as error:
                failure = error
        raise failure

    def _rendered(self, given: Rendering) -> str:
        if self._tool_use is not None and given.tools:
            return self._tool_use.render(given)
        turns = _with_one_opening(given.messages)
        later = any(turn["role"] in _SYSTEM for turn in turns[1:])
        if later and not self._shows_later_system:
            turns = _without_later_system(turns)
        if not self._knows_developer:
            for turn in turns:
                turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        if given.continue_final_message:
            turns[-1]["content"] = (turns[-1].get("content") or "") + _END_OF_FINAL_MESSAGE
        if self._takes_parts or (given.images and self._reads_parts):
            for turn in turns:
                turn["content"] = content_parts(turn.get("content") or "", images=given.images)
        context = {
            **self._variables,
            **(given.arguments or {}),
            "messages": turns,
            "tools": given.tools,
            "add_generation_prompt": given.add_generation_prompt,
        }
        if given.documents is not None:
            context["documents"] = given.documents
        try:
            text = self._template.render(context)
        except Exception as error:  # templates evaluate expressions on the client's data
            raise TemplateFailed(f"the chat template failed: {error}") from error
        if not given.continue_final_message:
            return text
        prompt, mark, _ = text.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise TemplateFailed("the chat template does not show the final message")
        return prompt

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether the template renders text parts of a content."""
        return self._shows([{"type": "text", "text": _PROBE}])

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template renders text only in parts."""
        return not self._shows(_PROBE) and self._reads_parts

    @functools.cached_property
    def _shows_later_system(self) -> bool:
        """Whether a system message after the first turn is rendered."""
        return self._shows("c", ("user", "a"), ("assistant", "b"), ("system", _PROBE))

    def _shows(self, content: object, *before: tuple[str, str]) -> bool:
        """Return whether a probe in the last user message, or in one before it, is rendered."""
        said = [*before, ("user", content)]
        messages = [{"role": role, "content": each} for role, each in said]
        context = {"messages": messages, "tools": None, "add_generation_prompt": False}
        try:
            text = self._template.render({**self._variables, **context})
        except Exception:  # as in `render`
            return False
        return _PROBE in text and "'type'" not in text  # not a list rendered as its Python repr


def _with_one_opening(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the system and developer messages at the start of a conversation."""
    turns = [dict(message) for message in messages]
    begin = next((i for i, turn in enumerate(turns) if turn["role"] not in _SYSTEM), len(turns))
    if begin > 1:
        texts = [turn.get("content") or "" for turn in turns[:begin]]
        turns[:begin] = [{**turns[0], "content": "\n\n".join(filter(None, texts))}]
    return turns


def _without_later_system(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge later system messages into an adjacent user or tool message.

    Templates that take one system message often require user and assistant turns to alternate too.
    """
    kept = [*turns[:1]]
    joins = False
    for turn in turns[1:]:
        is_system = turn["role"] in _SYSTEM
        into_last = is_system and kept[-1]["role"] in ("user", "tool")
        if into_last or (joins and turn["role"] == "user"):
            texts = (kept[-1].get("content"), turn.get("content"))
            kept[-1] = {**kept[-1], "content": "\n\n".join(filter(None, texts))}
        else:
            kept.append({**turn, "role": "user"} if is_system else turn)
        joins = is_system and kept[-1]["role"] == "user"
    return kept
