"""The formats in which models write tool calls, by the names that `--tool-call-parser` knows."""

import secrets
import string
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from server.answer.parts import AnswerParser
from server.answer.reasoning import ReasoningTags
from server.api.shared.tools import FunctionDefinition
from server.tool_calls.call_list import CallListParser
from server.tool_calls.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    DeepSeekParser,
)
from server.tool_calls.glm45 import TAGS as GLM45_TAGS
from server.tool_calls.glm45 import Glm45Parser
from server.tool_calls.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, HarmonyParser
from server.tool_calls.harmony import MARKERS as HARMONY_MARKERS
from server.tool_calls.harmony import TAGS as HARMONY_TAGS
from server.tool_calls.hermes import HermesParser
from server.tool_calls.llama3_json import Llama3JsonParser
from server.tool_calls.marked_list import MARKERS as GRANITE_MARKERS
from server.tool_calls.marked_list import MarkedListParser
from server.tool_calls.mistral import MistralParser
from server.tool_calls.pythonic import PythonicParser
from server.tool_calls.qwen3_coder import Qwen3CoderParser


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _nine_letters() -> str:
    """These models' templates take no other names."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(9))


class CallSyntax(msgspec.Struct, frozen=True):
    """The text around the arguments of calls.

    `{name}` stands for a function's name in JSON, `{bare_name}` for the name alone.
    """

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
    starts: tuple[str, ...] = ()
    """Those of them that calls begin with."""
    channels: ReasoningTags | None = None
    """The parser tells reasoning from the rest as well; these tags lead from one to the other."""
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
    starts=("<tool_call>",),
)

_DEEPSEEK_V3 = CallFormat(
    parser=DeepSeekParser,
    syntax=CallSyntax(
        f"{CALL_BEGIN}function{SEPARATOR}{{bare_name}}\n```json\n",
        f"\n```{CALL_END}",
        "\n",
        CALLS_BEGIN,
        CALLS_END,
    ),
    markers=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEPARATOR, CALL_END),
    starts=(CALLS_BEGIN, CALL_BEGIN),
)

_QWEN3_CODER = CallFormat(
    parser=Qwen3CoderParser,
    syntax=None,
    markers=("<tool_call>", "</tool_call>"),
    starts=("<tool_call>",),
)

_PLUGIN = "<|action_start|><|plugin|>"

CALL_FORMATS = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": msgspec.structs.replace(
        _DEEPSEEK_V3,
        syntax=CallSyntax(
            f"{CALL_BEGIN}{{bare_name}}{SEPARATOR}", CALL_END, "", CALLS_BEGIN, CALLS_END
        ),
    ),
    "glm45": CallFormat(
        parser=Glm45Parser,
        syntax=None,
        markers=("<tool_call>", "</tool_call>", *GLM45_TAGS),
        starts=("<tool_call>",),
    ),
    "granite": CallFormat(
        parser=MarkedListParser,
        syntax=CallSyntax('{"name": {name}, "arguments": ', "}", ", ", "<|tool_call|>[", "]"),
        markers=GRANITE_MARKERS,
        starts=GRANITE_MARKERS,
    ),
    "internlm": CallFormat(
        parser=partial(HermesParser, start=_PLUGIN, end="<|action_end|>"),
        syntax=CallSyntax(
            f'{_PLUGIN}\n{{"name": {{name}}, "parameters": ', "}<|action_end|>", "\n"
        ),
        markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        starts=(_PLUGIN,),
    ),
    "openai": CallFormat(
        parser=HarmonyParser,
        syntax=CallSyntax(
            f"{CHANNEL}commentary to=functions.{{bare_name}} {CONSTRAIN}json{MESSAGE}",
            "",
            f"{END}{START}assistant",
        ),
        markers=HARMONY_MARKERS,
        channels=HARMONY_TAGS,
    ),
    "pythonic": CallFormat(
        parser=PythonicParser,
        syntax=None,
        markers=("<|python_start|>", "<|python_end|>"),
        starts=("<|python_start|>",),
    ),
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "llama3_json": CallFormat(
        parser=Llama3JsonParser,
        syntax=CallSyntax('{"name": {name}, "parameters": ', "}", "; "),
        markers=("<|python_tag|>",),
        starts=("<|python_tag|>",),
    ),
    "mistral": CallFormat(
        parser=MistralParser,
        syntax=None,
        markers=("[TOOL_CALLS]", "[ARGS]"),
        starts=("[TOOL_CALLS]",),
        new_id=_nine_letters,
    ),
}


def detect(template: str) -> str | None:
    """Return the name of the format that a chat template teaches, None if it is none of these."""
    for name, texts in _SHOWN_BY:
        if all(text in template for text in texts):
            return name
    return None


_SHOWN_BY = (
    ("openai", (CHANNEL, MESSAGE)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", (CALL_BEGIN, "```json")),
    ("deepseek_v31", (CALL_BEGIN,)),
    ("granite", ("<|tool_call|>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("ipython", '"parameters"')),
)
"""Texts in the templates of each format; the first whose texts are all there counts."""

OF_FAMILY = {
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm45",
    "gpt_oss": "openai",
    "granite": "granite",
    "granitemoe": "granite",
    "internlm2": "internlm",
    "llama4": "pythonic",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
}
"""Formats by the `model_type` of a model's configuration, where the template shows tools and says
nothing of how they are called."""
