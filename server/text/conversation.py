"""A conversation as the text of a prompt."""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from server.errors import invalid, invalid_field, too_complex
from server.json_price import Price, TooCostly, price
from server.schema.body import JsonObject
from server.schema.messages import ChatMessage, MediaPart, RefusalPart
from server.text.chat_template import RESERVED_ARGUMENTS, Rendering, TemplateFailed
from server.text.placeholders import IMAGE, PART
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape in JSON that may be half of a surrogate pair."""
_INLINE_PIECES = 128
"""Maximum messages, parts, calls and documents that are rendered on the event loop: their number
costs a template more time than their length."""
_ONLY_ASSISTANTS = "only messages of assistants may have a refusal"


ToolInjector = Callable[..., list[JsonObject]]
"""Adds tools to messages, as `server.answer.injection.told` does."""


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
    told: ToolInjector | None = None,
    documents: list[JsonObject] | None = None,
    arguments: JsonObject | None = None,
    images: Collection[int] = (),
) -> str:
    """Return the text of a conversation; much of it is rendered beside the event loop.

    What clients wrote is hidden in it as far as it would stand for images (`Placeholders`).

    Args:
        tokenizer: has the model's template.
        messages: the conversation.
        template: what the request has instead, which `templates` render.
        templates: None where no request may have one.
        told: puts tools, calls and results into the messages, for a template that knows none.
        add_generation_prompt: and the others but the last are arguments of templates.
        images: the `id` of each part of a message that is an image for the model.

    Raises:
        ApiError: there is no template, or it does not accept the conversation.
    """
    own = tokenizer.chat_template
    if template is not None and templates is None:
        raise invalid_field(
            "chat_template", "the server runs without --trust-request-chat-template"
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

    placeholders = tokenizer.placeholders
    hide = _as_it_is if placeholders is None else placeholders.hide

    def attempts() -> list[Rendering]:
        _check_arguments(messages)
        shown_tools = hide(tools)
        turns = [_turn(message, index, images, hide) for index, message in enumerate(messages)]
        knows_tools = told is None or not tools or (template is not None and "tools" in template)
        shown: list[tuple[list[JsonObject], list[JsonObject] | None]] = []
        for form in _forms(turns):
            if knows_tools or told is None or not shown_tools:
                shown.append((form, shown_tools or None))
            else:  # many take no system message
                shown += [
                    (told(form, shown_tools, in_system=in_system), None)
                    for in_system in (True, False)
                ]
        return [
            Rendering(
                messages=each,
                add_generation_prompt=begins_turn,
                continue_final_message=continue_final_message,
                tools=tools_shown,
                documents=hide(documents),
                arguments=hide(arguments),
                images=bool(images),
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
            return await asyncio.to_thread(lambda: own.render(*attempts()))
        return own.render(*attempts())
    except TemplateFailed as error:
        field = "messages" if template is None else "chat_template"
        raise invalid_field(field, f"{error}") from error


def _check_options(
    arguments: JsonObject | None, add_generation_prompt: bool | None, continue_final_message: bool
) -> None:
    """Refuse options that exclude each other, and arguments that are fields of requests."""
    if add_generation_prompt and continue_final_message:
        raise invalid_field("continue_final_message", "not together with add_generation_prompt")
    reserved = RESERVED_ARGUMENTS.intersection(arguments or ())
    if reserved:
        name = min(reserved)
        raise invalid(
            f"chat_template_kwargs.{name}: set this as a field of the request",
            "chat_template_kwargs",
        )


def said_last(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message if it is an assistant's, else ""."""
    last = messages[-1]
    return _content(last, f"messages[{len(messages) - 1}]") if last.role == "assistant" else ""


def _as_it_is(value: Any) -> Any:
    return value


def image_parts(
    messages: Sequence[ChatMessage],
) -> list[tuple[ChatMessage, str, MediaPart]]:
    """Return the images of a conversation, each with its message and the field that it came in.

    Raises:
        ApiError: an assistant is said to have sent one.
    """
    found = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.parts):
            if isinstance(part, MediaPart) and part.url is not None:
                field = f"messages[{index}].content[{place}]"
                if message.role == "assistant":
                    raise invalid_field(field, "assistants send no images")
                found.append((message, field, part))
    return found


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


def _turn(
    message: ChatMessage, index: int, images: Collection[int], hide: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return a message as templates expect it: text parts joined, tool arguments as objects."""
    field = f"messages[{index}]"
    if message.function_call is not None:
        raise invalid_field(f"{field}.function_call", "use tool_calls instead")
    turn = message.model_dump(exclude_none=True)
    turn["content"] = _content(message, field, images, hide)
    turn.pop("refusal", None)
    if message.role == "function":
        turn["role"] = "tool"  # its successor, which templates know
    thought = turn.get("reasoning_content", turn.get("reasoning"))
    if thought is not None:  # templates read it by either name
        turn.setdefault("reasoning_content", thought)
        turn.setdefault("reasoning", thought)
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)  # templates take its presence for a call
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        arguments = function.get("arguments", {})
        function["arguments"] = _arguments(arguments) if isinstance(arguments, str) else arguments
    return {name: each if name == "content" else hide(each) for name, each in turn.items()}


def _forms(turns: list[JsonObject]) -> list[list[JsonObject]]:
    """Return a conversation as templates may take it.

    Arguments of calls that are no JSON objects are texts, which many templates show as they are;
    for those that fail on them, they are empty.
    """
    calls = [call["function"] for turn in turns for call in turn.get("tool_calls", ())]
    if not any(isinstance(function["arguments"], str) for function in calls):
        return [turns]
    emptied = []
    for turn in turns:
        copied = dict(turn)
        if "tool_calls" in turn:
            copied["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {}}}
                if isinstance(call["function"]["arguments"], str)
                else call
                for call in turn["tool_calls"]
            ]
        emptied.append(copied)
    return [turns, emptied]


def _content(
    message: ChatMessage,
    field: str,
    images: Collection[int] = (),
    hide: Callable[[Any], Any] = _as_it_is,
) -> str:
    """Return the text of a message; what an assistant refused with is what it said.

    With images there are marks in it (`server.text.placeholders`).
    """
    content, is_assistant = message.content, message.role == "assistant"
    if message.refusal is not None and not is_assistant:
        raise invalid_field(f"{field}.refusal", f"{_ONLY_ASSISTANTS}")
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise invalid_field(
                f"{field}.content", "may only be absent from messages of assistants and tools"
            )
        return str(hide(message.refusal or ""))
    if isinstance(content, str):
        return str(hide(content))
    texts = []
    has_images = False
    for index, part in enumerate(content):
        if isinstance(part, RefusalPart):
            if not is_assistant:
                place = f"{field}.content[{index}]"
                raise invalid_field(place, f"{_ONLY_ASSISTANTS}")
            texts.append(hide(part.refusal))
        elif id(part) in images:
            has_images = True
            texts.append(IMAGE)
        elif isinstance(part, MediaPart):
            if message.role not in ("tool", "function"):
                place = f"{field}.content[{index}]"
                raise invalid_field(place, f"{_why_not(part, hide)}; send no {part.type}")
            texts.append(f"[{part.type} omitted: {_why_not(part, hide)}]")
        else:
            texts.append(hide(part.text))
    return (PART if has_images else "\n").join(texts)


def _why_not(part: MediaPart, hide: Callable[[Any], Any]) -> str:
    """Say why a part is not shown to the model."""
    if hide is _as_it_is:
        return "this model reads text"
    if part.url is not None:
        return "no images are taken here"
    return "it holds no image" if part.is_image else "this model reads text and images"


def _arguments(text: str) -> JsonObject | str:
    """Return the arguments of an earlier call: an object if they are one, else their text.

    A conversation does not end because a model once wrote them wrong. What says nothing is {}.
    """
    try:
        arguments = json.loads(text) if text.strip() else {}
        if _SURROGATE.search(text):
            # Half a pair has no UTF-8, which tokenizers take; answers of models may have one.
            plain = json.dumps(arguments, ensure_ascii=False).encode("utf-16", "surrogatepass")
            arguments = json.loads(plain.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text if arguments else {}
