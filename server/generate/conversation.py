"""Rendering of conversations to prompt text."""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from server.answer.tool_choice import ToolUse
from server.errors import invalid, invalid_field, too_complex, unavailable
from server.generate.model import ServedModel
from server.generate.request import Conversation
from server.json_price import Price, TooCostly, price
from server.limits import MAX_ECHO
from server.schema.body import JsonObject
from server.schema.messages import ChatMessage, MediaPart, RefusalPart
from server.text.chat_template import RESERVED_ARGUMENTS, Rendering, TemplateFailed
from server.text.placeholders import IMAGE, PART

logger = logging.getLogger(__name__)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape that may be half of a surrogate pair."""
_INLINE_PIECES = 128
"""Maximum messages, parts, calls and documents that are rendered on the event loop: the cost of a
template depends more on their number than on their length."""
_ONLY_ASSISTANTS = "only assistant messages can have a refusal"


def _pieces(message: ChatMessage) -> int:
    parts = len(message.content) if isinstance(message.content, list) else 0
    return 1 + parts + 4 * len(message.tool_calls or ())


async def rendered(source: Conversation, tools: ToolUse, model: ServedModel) -> str:
    """Return the text of a conversation; large ones are rendered off the event loop.

    `tools` are those that the template shows. Client text that looks like an image placeholder is
    escaped (`Placeholders`).

    Raises:
        ApiError: there is no template, it does not accept the conversation, or a template of the
            request cannot be rendered now.
    """
    messages, template = source.messages, source.template
    own, templates = model.tokenizer.chat_template, model.templates
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
    if source.add_generation_prompt and source.continue_final_message:
        raise invalid_field(
            "continue_final_message", "cannot be combined with add_generation_prompt"
        )
    reserved = RESERVED_ARGUMENTS.intersection(source.template_arguments or ())
    if reserved:
        raise invalid(
            f"chat_template_kwargs.{min(reserved)}: set this as a field of the request",
            "chat_template_kwargs",
        )
    many = sum(map(_pieces, messages)) + len(source.documents or ()) > _INLINE_PIECES
    if many:
        forms = await asyncio.to_thread(_attempts, source, tools, model)
    else:
        forms = _attempts(source, tools, model)
    try:
        if template is not None and templates is not None:
            text = await templates.render(template, forms)
        else:
            assert own is not None
            text = await asyncio.to_thread(own.render, *forms) if many else own.render(*forms)
    except TemplateFailed as error:
        field = "messages" if template is None else "chat_template"
        raise invalid_field(field, str(error)) from error
    except OSError as error:
        logger.warning("cannot render templates of requests: %s", error)
        raise unavailable("Templates cannot be rendered now; try again later.") from error
    if source.images and model.images is not None:
        text = model.images.prompt_text(text, source.shown_images)
    return text


def _attempts(source: Conversation, tools: ToolUse, model: ServedModel) -> list[Rendering]:
    """Return the forms of a conversation to try with the template, in order."""
    messages, template, images = source.messages, source.template, source.images
    placeholders = model.tokenizer.placeholders
    hide = _unchanged if placeholders is None else placeholders.hide
    _check_arguments(messages)
    shown_tools = hide(tools.shown)
    turns = [_turn(message, index, images, hide) for index, message in enumerate(messages)]
    knows_tools = not model.formats.describes_tools or (
        template is not None and "tools" in template
    )
    shown: list[tuple[list[JsonObject], list[JsonObject] | None]] = []
    for form in _forms(turns):
        if knows_tools or not shown_tools:
            shown.append((form, shown_tools or None))
        else:  # many templates take no system message
            for in_system in (True, False):
                shown.append((with_tools_as_text(form, shown_tools, in_system=in_system), None))
    begins_turn = source.add_generation_prompt
    return [
        Rendering(
            messages=each,
            add_generation_prompt=(
                not source.continue_final_message if begins_turn is None else begins_turn
            ),
            continue_final_message=source.continue_final_message,
            tools=tools_shown,
            documents=hide(source.documents),
            arguments=hide(source.template_arguments),
            images=bool(images),
        )
        for each, tools_shown in shown
    ]


_INSTRUCTION = """You can call functions. Each is described by one line of JSON:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"the parameter": "its value"}}}}
</tool_call>
The result comes back between <tool_response> and </tool_response>."""


def with_tools_as_text(
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    in_system: bool = True,
) -> list[dict[str, Any]]:
    """Return a conversation with tools, calls and results converted to text.

    Args:
        turns: messages as templates expect them, call arguments as objects.
        tools: the tools of the request, as sent by the client.
        in_system: describe the tools in the system message; otherwise in the first user message,
            for templates without system messages.
    """
    plain = _as_texts(turns)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=lines)
    role = "system" if in_system else "user"
    for turn in plain:
        if turn["role"] == role or (in_system and turn["role"] == "developer"):
            content = turn["content"]
            parts = (content, instruction) if in_system else (instruction, content)
            turn["content"] = "\n\n".join(filter(None, parts))
            return plain
    return [{"role": role, "content": instruction}, *plain]


def _as_texts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without calls; consecutive tool results become one user message.

    Many templates require user and assistant turns to alternate.
    """
    plain: list[dict[str, Any]] = []
    of_tool = False
    for turn in turns:
        after_tool, of_tool = of_tool, turn["role"] == "tool"
        text = turn.get("content") or ""
        if of_tool:
            text = f"<tool_response>\n{text}\n</tool_response>"
        joins = of_tool or (after_tool and turn["role"] == "user")
        if joins and plain and plain[-1]["role"] == "user":
            plain[-1]["content"] += f"\n{text}"
            continue
        role = "user" if of_tool else turn["role"]
        calls = []
        for call in turn.get("tool_calls", ()):
            name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"]
            if not isinstance(arguments, str):  # a string is malformed JSON of an earlier answer
                arguments = json.dumps(arguments, ensure_ascii=False)
            written = f'{{"name": {name}, "arguments": {arguments}}}'
            calls.append(f"<tool_call>\n{written}\n</tool_call>")
        kept = {key: value for key, value in turn.items() if key != "tool_calls"}
        plain.append({**kept, "role": role, "content": "\n".join(filter(None, [text, *calls]))})
    return plain


def echo_of(messages: Sequence[ChatMessage], answers: int) -> str:
    """Return the last message for answers to repeat if it is an assistant's, else "".

    Raises:
        ApiError: the answers together would repeat too much text.
    """
    last = messages[-1]
    text = _content(last, f"messages[{len(messages) - 1}]") if last.role == "assistant" else ""
    if len(text) * answers > MAX_ECHO:
        raise invalid_field(
            "echo", f"{answers} answers that repeat {len(text)} characters are more than {MAX_ECHO}"
        )
    return text


def _unchanged(value: Any) -> Any:
    return value


def image_parts(
    messages: Sequence[ChatMessage],
) -> list[tuple[ChatMessage, str, MediaPart]]:
    """Return the images of a conversation, each with its message and the field it came from.

    Raises:
        ApiError: an image is in an assistant message.
    """
    found = []
    for index, message in enumerate(messages):
        for position, part in enumerate(message.parts):
            if isinstance(part, MediaPart) and part.url is not None:
                field = f"messages[{index}].content[{position}]"
                if message.role == "assistant":
                    raise invalid_field(field, "assistant messages cannot contain images")
                found.append((message, field, part))
    return found


def _check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse call arguments (JSON in strings) that would create too many objects in total."""
    total = Price(0)
    for index, message in enumerate(messages):
        for position, call in enumerate(message.tool_calls or ()):
            arguments = call.function.arguments
            if isinstance(arguments, str):
                try:
                    total = total.plus(price(arguments.encode("utf-8", "replace")))
                    total.check()
                except TooCostly as error:
                    field = f"messages[{index}].tool_calls[{position}].function.arguments"
                    raise too_complex(error, field) from error


def _turn(
    message: ChatMessage, index: int, images: Collection[int], hide: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return a message as templates expect it: text parts joined, call arguments as objects."""
    field = f"messages[{index}]"
    if message.function_call is not None:
        raise invalid_field(f"{field}.function_call", "use tool_calls instead")
    turn = message.model_dump(exclude_none=True)
    turn["content"] = _content(message, field, images, hide)
    turn.pop("refusal", None)
    if message.role == "function":
        turn["role"] = "tool"  # the successor of "function", which templates support
    thought = turn.get("reasoning_content", turn.get("reasoning"))
    if thought is not None:  # templates use either name
        turn.setdefault("reasoning_content", thought)
        turn.setdefault("reasoning", thought)
        if turn.get("tool_calls") and not turn["content"]:
            turn.setdefault("thinking", thought)  # GPT-OSS's, which refuses it beside a text
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)  # templates take an empty list for calls
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        arguments = function.get("arguments", {})
        function["arguments"] = _arguments(arguments) if isinstance(arguments, str) else arguments
    return {name: each if name == "content" else hide(each) for name, each in turn.items()}


def _forms(turns: list[JsonObject]) -> list[list[JsonObject]]:
    """Return the forms of a conversation that a template may accept, in order of preference.

    Call arguments that are not JSON objects stay strings, which many templates show verbatim; for
    templates that fail on them they are replaced by empty objects.
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
    hide: Callable[[Any], Any] = _unchanged,
) -> str:
    """Return the text of a message; an assistant's refusal counts as its content.

    Images are represented by placeholders (`server.text.placeholders`).
    """
    content, is_assistant = message.content, message.role == "assistant"
    if message.refusal is not None and not is_assistant:
        raise invalid_field(f"{field}.refusal", _ONLY_ASSISTANTS)
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise invalid_field(
                f"{field}.content", "can be omitted only in assistant and tool messages"
            )
        return str(hide(message.refusal or ""))
    if isinstance(content, str):
        return str(hide(content))
    texts = []
    has_images = False
    for index, part in enumerate(content):
        if isinstance(part, RefusalPart):
            if not is_assistant:
                part_field = f"{field}.content[{index}]"
                raise invalid_field(part_field, _ONLY_ASSISTANTS)
            texts.append(hide(part.refusal))
        elif id(part) in images:
            has_images = True
            texts.append(IMAGE)
        elif isinstance(part, MediaPart):
            if message.role not in ("tool", "function"):
                part_field = f"{field}.content[{index}]"
                raise invalid_field(part_field, f"{_reason(part, hide)}; send no {part.type}")
            texts.append(f"[{part.type} omitted: {_reason(part, hide)}]")
        else:
            texts.append(hide(part.text))
    return (PART if has_images else "\n").join(texts)


def _reason(part: MediaPart, hide: Callable[[Any], Any]) -> str:
    if hide is _unchanged:
        return "this model reads text"
    if part.url is not None:
        return "images are not accepted here"
    return "it holds no image" if part.is_image else "this model reads text and images"


def _arguments(text: str) -> JsonObject | str:
    """Return the arguments of an earlier call as an object; malformed ones stay a string.

    Malformed arguments of an earlier answer must not end the conversation. Empty ones become {}.
    """
    try:
        arguments = json.loads(text) if text.strip() else {}
        if _SURROGATE.search(text):
            # A lone surrogate has no UTF-8 encoding, which tokenizers need; models can emit one.
            plain = json.dumps(arguments, ensure_ascii=False).encode("utf-16", "surrogatepass")
            arguments = json.loads(plain.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text if arguments else {}
