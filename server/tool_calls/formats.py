"""The formats in which models write tool calls, by the names that `--tool-call-parser` knows."""

import secrets
import string
import uuid
from collections.abc import Callable, Sequence

import msgspec

from server.answer.parts import AnswerParser
from server.api.shared.tools import FunctionDefinition
from server.tool_calls.call_list import CallListParser
from server.tool_calls.hermes import HermesParser
from server.tool_calls.llama3_json import Llama3JsonParser
from server.tool_calls.mistral import MistralParser
from server.tool_calls.qwen3_coder import Qwen3CoderParser


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _nine_letters() -> str:
    """These models' templates take no other names."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(9))


class CallSyntax(msgspec.Struct, frozen=True):
    """The text around the arguments of calls; `{name}` stands for a function's name in JSON."""

    before: str
    after: str
    separator: str
    opening: str = ""
    closing: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format: how an answer is read, and how one is enforced."""

    parser: Callable[[Sequence[FunctionDefinition]], AnswerParser]
    """Makes the parser of one answer; it gets the functions that the request allows."""
    syntax: CallSyntax | None
    """None: the format itself cannot be enforced, `JSON_LIST` is in its place."""
    markers: tuple[str, ...] = ()
    """Texts that a tokenizer may have as special tokens and that the parser has to see."""
    new_id: Callable[[], str] = _new_id
    """Makes the name of a call, by which its result is told to the model."""


def _json_list(functions: Sequence[FunctionDefinition]) -> CallListParser:
    names = frozenset([function.name for function in functions])
    return CallListParser(" \t\r\n[],", accepts=names.__contains__)


JSON_LIST = CallFormat(
    parser=_json_list,
    syntax=CallSyntax('{"name": {name}, "parameters": ', "}", ", ", "[", "]"),
)
"""What a model without a format of its own is held to when it has to call a tool."""

_HERMES = CallFormat(
    parser=HermesParser,
    syntax=CallSyntax('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>", "\n"),
    markers=("<tool_call>", "</tool_call>"),
)

CALL_FORMATS = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": CallFormat(
        parser=Qwen3CoderParser, syntax=None, markers=("<tool_call>", "</tool_call>")
    ),
    "llama3_json": CallFormat(
        parser=Llama3JsonParser,
        syntax=CallSyntax('{"name": {name}, "parameters": ', "}", "; "),
        markers=("<|python_tag|>",),
    ),
    "mistral": CallFormat(
        parser=MistralParser,
        syntax=None,
        markers=("[TOOL_CALLS]", "[ARGS]"),
        new_id=_nine_letters,
    ),
}


def detect(template: str) -> CallFormat | None:
    """Return the format that a chat template teaches, None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return CALL_FORMATS["mistral"]
    if "<tool_call>" in template:
        return CALL_FORMATS["qwen3_coder" if "<function=" in template else "hermes"]
    if "ipython" in template and '"parameters"' in template:
        return CALL_FORMATS["llama3_json"]
    return None
