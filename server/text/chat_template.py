"""Chat templates: Jinja as Hugging Face models use it, compiled once, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_END_OF_FINAL_MESSAGE = "\ue000end-of-final-message\ue001"

RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


class TemplateFailed(ValueError):
    """The template refused the conversation or failed on it; the message says why."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what is trained on: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
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
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the special tokens that it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` maps names such as `bos_token` to text.

        Raises:
            ValueError: the template is not valid Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self.shows_tools = "tools" in source
        """Whether the template does something with tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for a conversation.

        A `developer` turn is shown as `system` to templates that do not know the role. With
        `continue_final_message` the prompt ends where the last message's content ends.

        Raises:
            TemplateFailed: the template does not accept the conversation.
        """
        turns = [dict(message) for message in messages]
        if not self._knows_developer:
            for turn in turns:
                turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        if continue_final_message:
            turns[-1]["content"] = (turns[-1].get("content") or "") + _END_OF_FINAL_MESSAGE
        context = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": turns,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if documents is not None:
            context["documents"] = documents
        try:
            text = self._template.render(context)
        except Exception as error:  # templates run expressions over the client's data
            raise TemplateFailed(f"the chat template failed: {error}") from error
        if not continue_final_message:
            return text
        prompt, mark, _ = text.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise TemplateFailed("the chat template does not show the final message")
        return prompt
