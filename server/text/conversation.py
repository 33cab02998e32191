"""A conversation as the text of a prompt."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from server.api.shared.body import JsonObject
from server.api.shared.messages import ChatMessage, RefusalPart
from server.http.errors import invalid, too_complex
from server.http.json_price import Price, TooCostly, price
from server.text.chat_template import RESERVED_ARGUMENTS, ChatTemplate, TemplateFailed
from server.text.request_templates import RequestTemplates
from server.text.template_process import Rendering
from server.text.tokenizer import ServedTokenizer

_INLINE_PIECES = 128
"""Messages, parts of them, calls and documents that are rendered without another thread: templates
work through each of them, and go over texts fast."""


class TellsTools(Protocol):
    """Puts tools into messages; see `server.tool_calls.injection.told`."""

    def __call__(
        self,
        turns: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        *,
        in_system: bool = True,
    ) -> list[JsonObject]: ...


def _pieces(message: ChatMessage) -> int:
    parts = len(message.content) if isinstance(message.content, list) else 0
    return 1 + parts + 4 * len(message.tool_calls or ())


async def render_chat(
    tokenizer: ServedTokenizer,
    messages: Sequence[ChatMessage],
    *,
    template: str | None = None,
    templates: RequestTemplates | None = None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    tools: list[JsonObject] | None = None,
    told: TellsTools | None = None,
    documents: list[JsonObject] | None = None,
    arguments: JsonObject | None = None,
) -> str:
    """Return the text of a conversation; much of it is rendered beside the event loop.

    Args:
        tokenizer: has the model's template.
        messages: the conversation.
        template: what the request has instead, which `templates` render.
        templates: None where no request may have one.
        told: puts tools, calls and results into the messages, for a template that knows none.
        add_generation_prompt: and the others are arguments of templates.

    Raises:
        ApiError: there is no template, or it does not accept the conversation.
    """
    own = tokenizer.chat_template
    if template is not None and templates is None:
        raise invalid(
            "chat_template: the server runs without --trust-request-chat-template",
            "chat_template",
        )
    if template is None and own is None:
        raise invalid(
            "The model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE.",
            "messages",
        )
    _check_options(arguments, add_generation_prompt, continue_final_message)
    begins_turn = add_generation_prompt
    if begins_turn is None:
        begins_turn = not continue_final_message

    def attempts() -> list[Rendering]:
        _check_arguments(messages)
        turns = [_turn(message, index) for index, message in enumerate(messages)]
        knows_tools = told is None or not tools or (template is not None and "tools" in template)
        if knows_tools or told is None or not tools:
            shown = [(turns, tools or None)]
        else:  # many take no system message
            shown = [(told(turns, tools), None), (told(turns, tools, in_system=False), None)]
        return [
            Rendering(
                messages=each,
                add_generation_prompt=begins_turn,
                continue_final_message=continue_final_message,
                tools=tools_shown,
                documents=documents,
                arguments=arguments,
            )
            for each, tools_shown in shown
        ]

    many = sum(map(_pieces, messages)) + len(documents or ()) > _INLINE_PIECES
    try:
        if template is not None and templates is not None:
            prepared = await asyncio.to_thread(attempts) if many else attempts()
            return await templates.render(template, prepared)
        assert own is not None
        if many:
            return await asyncio.to_thread(lambda: _rendered(own, attempts()))
        return _rendered(own, attempts())
    except TemplateFailed as error:
        field = "messages" if template is None else "chat_template"
        raise invalid(f"{field}: {error}", field) from error


def _check_options(
    arguments: JsonObject | None, add_generation_prompt: bool | None, continue_final_message: bool
) -> None:
    """Refuse options that exclude each other, and arguments that are fields of requests."""
    if add_generation_prompt and continue_final_message:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    reserved = RESERVED_ARGUMENTS.intersection(arguments or ())
    if reserved:
        name = min(reserved)
        raise invalid(
            f"chat_template_kwargs.{name}: is a field of the request", "chat_template_kwargs"
        )


def _rendered(template: ChatTemplate, attempts: Sequence[Rendering]) -> str:
    """Return the text of the first attempt that the template accepts."""
    *others, last = attempts
    for attempt in others:
        try:
            return template.render(**msgspec.structs.asdict(attempt))
        except TemplateFailed:
            continue
    return template.render(**msgspec.structs.asdict(last))


def said_last(messages: Sequence[ChatMessage]) -> str:
    """Return what the last message says if it is an assistant's, else ""."""
    last = messages[-1]
    return _content(last, f"messages[{len(messages) - 1}]") if last.role == "assistant" else ""


def _check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse arguments of calls, which are JSON in texts, that make too many objects in all."""
    total = Price(0)
    for index, message in enumerate(messages):
        for position, call in enumerate(message.tool_calls or ()):
            arguments = call.function.arguments
            if isinstance(arguments, str):
                try:
                    total = total.plus(price(arguments.encode("utf-8", "replace")))
                    total.check()
                except TooCostly as error:
                    place = f"messages[{index}].tool_calls[{position}].function.arguments"
                    raise too_complex(error, place) from error


def _turn(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message as templates expect it: text parts joined, tool arguments as objects."""
    field = f"messages[{index}]"
    if message.function_call is not None:
        raise invalid(f"{field}.function_call: use tool_calls instead", f"{field}.function_call")
    turn = message.model_dump(exclude_none=True)
    turn["content"] = _content(message, field)
    turn.pop("refusal", None)
    if message.role == "function":
        turn["role"] = "tool"  # its successor, which templates know
    thought = turn.get("reasoning_content", turn.get("reasoning"))
    if thought is not None:  # templates read it by either name
        turn.setdefault("reasoning_content", thought)
        turn.setdefault("reasoning", thought)
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)  # templates take its presence for a call
    for position, call in enumerate(turn.get("tool_calls", ())):
        function = call["function"]
        if isinstance(function["arguments"], str):
            place = f"{field}.tool_calls[{position}].function.arguments"
            function["arguments"] = _arguments(function["arguments"], place)
    return turn


def _content(message: ChatMessage, field: str) -> str:
    """Return the text of a message; what an assistant refused with is what it said."""
    content, is_assistant = message.content, message.role == "assistant"
    if message.refusal is not None and not is_assistant:
        raise invalid(f"{field}.refusal: only assistants refuse", f"{field}.refusal")
    if content is None:
        if not is_assistant and message.role != "function":
            raise invalid(
                f"{field}.content: may be absent from assistant messages only", f"{field}.content"
            )
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, RefusalPart):
            if not is_assistant:
                place = f"{field}.content[{index}]"
                raise invalid(f"{place}: only assistants refuse", place)
            texts.append(part.refusal)
        else:
            texts.append(part.text)
    return "\n".join(texts)


def _arguments(text: str, field: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise invalid(f"{field}: not valid JSON: {error}", field) from error
    except RecursionError as error:
        raise invalid(f"{field}: nested too deeply", field) from error
    if not isinstance(arguments, dict):
        raise invalid(f"{field}: must be a JSON object", field)
    return arguments
