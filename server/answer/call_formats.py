"""Tool call formats of models, by their names in `--tool-call-parser`."""

import secrets
import string
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from server.answer.calls import CallsParser, CallStyle
from server.answer.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, HarmonyParser
from server.answer.harmony import MARKERS as HARMONY_MARKERS
from server.answer.harmony import TAGS as HARMONY_TAGS
from server.answer.named_call import NamedCall, NamedStyle
from server.answer.parts import AnswerParser
from server.answer.python_call import PythonCall
from server.answer.reasoning import ReasoningTags
from server.answer.tagged_call import TaggedCall, TaggedStyle
from server.schema.tools import FunctionDefinition


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _nine_letters() -> str:
    """Generate a call ID in the only form that these models' templates accept."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(9))


class CallSyntax(msgspec.Struct, frozen=True):
    """The text around the arguments of calls.

    `{name}` stands for a function's name as a JSON string, `{bare_name}` for the plain name.
    """

    before: str
    after: str
    separator: str
    opening: str = ""
    closing: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One format: its parser, and the syntax to enforce it."""

    parser: Callable[[Sequence[FunctionDefinition]], AnswerParser]
    """Creates the parser of one answer, given the functions that the request allows."""
    syntax: CallSyntax | None
    """None if the format cannot be enforced; `JSON_LIST` is used instead."""
    markers: tuple[str, ...] = ()
    """Strings that the parser must see even if they are special tokens of the tokenizer."""
    starts: tuple[str, ...] = ()
    """Those of the markers that start calls."""
    in_reasoning: Callable[[Sequence[FunctionDefinition]], AnswerParser] | None = None
    """Creates the parser of reasoning, where calls need a start marker; None if there is none."""
    channels: ReasoningTags | None = None
    """Tags between reasoning and content, if the parser separates these too."""
    new_id: Callable[[], str] = _new_id
    """Generates the ID of a call, to which its result refers."""


_PLUGIN = "<|action_start|><|plugin|>"
"""A start that consists of two tokens."""


def call_format(
    style: CallStyle,
    syntax: CallSyntax | None = None,
    *,
    tags: tuple[str, ...] = (),
    new_id: Callable[[], str] = _new_id,
) -> CallFormat:
    """Return a format of calls in plain text; `tags` are special tokens within calls."""
    starts = tuple([each for each in style.starts if each[0] in "<["])
    ends = tuple([each for each in style.ends if each[0] in "<[" and len(each) > 1])
    marked = msgspec.structs.replace(style, bare=(), behind_name="", hidden=())
    return CallFormat(
        parser=partial(CallsParser, style=style),
        in_reasoning=partial(CallsParser, style=marked) if style.starts else None,
        syntax=syntax,
        markers=tuple(
            dict.fromkeys(
                [each for each in (*starts, *ends, *style.hidden, *tags) if each != _PLUGIN]
            )
        ),
        starts=starts,
        new_id=new_id,
    )


def _json(key: str, opening: str, closing: str) -> CallSyntax:
    """Return the syntax of calls as an array of JSON objects."""
    return CallSyntax(f'{{"name": {{name}}, "{key}": ', "}", ", ", f"{opening}[", f"{closing}")


_BARE_JSON = ("```json", "```", "{", "[")

JSON_LIST = call_format(CallStyle(bare=_BARE_JSON, only_known=True), _json("parameters", "", "]"))
"""Format enforced for a forced call if the model has no enforceable format."""

_HERMES = call_format(
    CallStyle(starts=("<tool_call>",), ends=("</tool_call>",), bare=_BARE_JSON),
    CallSyntax('<tool_call>\n{"name": {name}, "arguments": ', "}\n</tool_call>", "\n"),
)


def _tagged(
    starts: tuple[str, ...],
    ends: tuple[str, ...],
    style: TaggedStyle,
    *,
    skipped: tuple[str, ...] = (),
    tags: tuple[str, ...] = (),
) -> CallFormat:
    """Return a format of calls with parameters between tags, which cannot be enforced."""
    style = msgspec.structs.replace(style, starts=starts, around=ends)
    calls = CallStyle(
        starts=starts,
        ends=ends,
        bare=(style.call,) if style.call else (),
        behind_name="" if style.call else style.parameter,
        skipped=skipped,
        body=partial(TaggedCall, style=style),
    )
    return call_format(calls, tags=tags)


_FUNCTION = TaggedStyle(
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
)


def _invoke(space: str, *, trims_line_ends: bool = True) -> TaggedStyle:
    """Return the tags `invoke` and `parameter` in a namespace."""
    return TaggedStyle(
        call=f"<{space}invoke name=",
        call_end=f"</{space}invoke>",
        parameter=f"<{space}parameter name=",
        parameter_end=f"</{space}parameter>",
        trims_line_ends=trims_line_ends,
    )


_QWEN3_CODER = _tagged(("<tool_call>",), ("</tool_call>",), _FUNCTION)
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK = CallStyle(
    starts=(_CALLS_BEGIN, _CALL_BEGIN),
    ends=(_CALL_END, _CALLS_END),
    body=partial(
        NamedCall,
        style=NamedStyle(before=f"function{_SEPARATOR}", separator=_SEPARATOR, fence="```json"),
    ),
)
_KIMI_BEGIN, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_KIMI_END = "<|tool_call_end|>"


def _python(starts: tuple[str, ...], ends: tuple[str, ...], bare: tuple[str, ...]) -> CallFormat:
    """Return a format of calls in Python syntax, which cannot be enforced."""
    return call_format(
        CallStyle(
            starts=starts,
            ends=("]", *ends),
            bare=bare,
            behind_name="(",
            at_line=True,
            only_known=True,
            skipped=("print(",),
            separators=" \t\r\n,;)",
            repeats=True,
            body=PythonCall,
        )
    )


def _gemma(start: str, end: str, quote: str) -> CallFormat:
    body = partial(NamedCall, style=NamedStyle(before="call:", quote=quote))
    return call_format(CallStyle(starts=(start,), ends=(end,), body=body), tags=(quote,))


CALL_FORMATS = {
    "command_r": call_format(
        CallStyle(
            starts=("<|START_ACTION|>", "Action:"),
            ends=("<|END_ACTION|>",),
            hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        CallSyntax(
            '{"tool_call_id": "0", "tool_name": {name}, "parameters": ',
            "}",
            ", ",
            "<|START_ACTION|>[",
            "]<|END_ACTION|>",
        ),
    ),
    "deepseek_v3": call_format(
        _DEEPSEEK,
        CallSyntax(
            f"{_CALL_BEGIN}function{_SEPARATOR}{{bare_name}}\n```json\n",
            f"\n```{_CALL_END}",
            "\n",
            _CALLS_BEGIN,
            _CALLS_END,
        ),
        tags=(_SEPARATOR,),
    ),
    "deepseek_v31": call_format(
        _DEEPSEEK,
        CallSyntax(
            f"{_CALL_BEGIN}{{bare_name}}{_SEPARATOR}", _CALL_END, "", _CALLS_BEGIN, _CALLS_END
        ),
        tags=(_SEPARATOR,),
    ),
    "deepseek_v32": _tagged(
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        _invoke("｜DSML｜", trims_line_ends=False),
    ),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm4": call_format(
        CallStyle(behind_name="{", at_line=True, body=partial(NamedCall, style=NamedStyle())),
        CallSyntax("{bare_name}\n", "", "\n"),
    ),
    "glm45": _tagged(
        ("<tool_call>",),
        ("</tool_call>",),
        TaggedStyle(
            parameter=_KEY,
            parameter_name_end=_KEY_END,
            value=_VALUE,
            parameter_end=_VALUE_END,
            ends_values=False,
            trims_line_ends=False,
        ),
        tags=(_KEY, _KEY_END, _VALUE, _VALUE_END),
    ),
    "granite": call_format(
        # Granite 3.0 and 3.2 onwards use the first start, 3.1 and 4 the second.
        CallStyle(starts=("<|tool_call|>", "<tool_call>"), ends=("</tool_call>",)),
        _json("arguments", "<|tool_call|>", "]"),
    ),
    "hermes": _HERMES,
    "internlm": call_format(
        CallStyle(starts=(_PLUGIN,), ends=("<|action_end|>",)),
        CallSyntax(f'{_PLUGIN}\n{{"name": {{name}}, "parameters": ', "}<|action_end|>", "\n"),
        tags=("<|action_start|>", "<|plugin|>"),
    ),
    "jamba": call_format(
        CallStyle(starts=("<tool_calls>",), ends=("</tool_calls>",)),
        _json("arguments", "<tool_calls>", "]</tool_calls>"),
    ),
    "kimi_k2": call_format(
        CallStyle(
            starts=("<|tool_calls_section_begin|>", _KIMI_BEGIN),
            ends=(_KIMI_END, "<|tool_calls_section_end|>"),
            body=partial(NamedCall, style=NamedStyle(separator=_KIMI_ARGUMENTS)),
        ),
        CallSyntax(
            f"{_KIMI_BEGIN}functions.{{bare_name}}:0{_KIMI_ARGUMENTS}",
            _KIMI_END,
            "",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        tags=(_KIMI_ARGUMENTS,),
    ),
    "lfm2": _python(("<|tool_call_start|>",), ("<|tool_call_end|>",), ("[",)),
    "llama3_json": call_format(
        CallStyle(
            starts=("<|python_tag|>", "<|python_start|>"),
            ends=("<|python_end|>",),
            bare=(*_BARE_JSON, "<function="),
            only_known=True,
            body=partial(TaggedCall, style=_FUNCTION),
        ),
        CallSyntax('{"name": {name}, "parameters": ', "}", "; "),
    ),
    "minimax_m2": _tagged(("<minimax:tool_call>",), ("</minimax:tool_call>",), _invoke("")),
    "mistral": call_format(
        CallStyle(
            starts=("[TOOL_CALLS]",),
            behind_name="[ARGS]",
            is_verbatim_behind=True,
            body=partial(NamedCall, style=NamedStyle(identifier="[CALL_ID]", separator="[ARGS]")),
        ),
        tags=("[CALL_ID]", "[ARGS]"),
        new_id=_nine_letters,
    ),
    "nemotron": call_format(
        CallStyle(starts=("<TOOLCALL>",), ends=("</TOOLCALL>",)),
        _json("arguments", "<TOOLCALL>", "]</TOOLCALL>"),
    ),
    "olmo3": _python(("<function_calls>",), ("</function_calls>",), ()),
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
    "phi4_mini": call_format(
        CallStyle(
            starts=("functools", "<|tool_call|>", "<|tool_calls|>"),
            ends=("<|/tool_call|>", "<|/tool_calls|>"),
        ),
        _json("arguments", "functools", "]"),
    ),
    "pythonic": _python(
        ("<|python_start|>", "```tool_code", "```python"), ("<|python_end|>",), _BARE_JSON
    ),
    "qwen": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _tagged(("<seed:tool_call>",), ("</seed:tool_call>",), _FUNCTION),
    "step3": _tagged(
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<steptml:toolcall>"),
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>", "</steptml:toolcall>"),
        _invoke("steptml:"),
        skipped=("function<｜tool_sep｜>",),
        tags=("<｜tool_sep｜>",),
    ),
    "xlam": call_format(
        CallStyle(starts=("[TOOL_CALLS]", "<tool_call>"), ends=("</tool_call>",), bare=_BARE_JSON),
        _json("arguments", "", "]"),
    ),
}


def detect(template: str) -> str | None:
    """Return the name of the format that a chat template describes, None if unknown."""
    for name, texts in _SHOWN_BY:
        if all(text in template for text in texts):
            return name
    return None


_SHOWN_BY = (
    ("openai", (CHANNEL, MESSAGE)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", (_CALL_BEGIN, "```json")),
    ("deepseek_v31", (_CALL_BEGIN,)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("step3", ("<steptml:invoke",)),
    ("kimi_k2", (_KIMI_BEGIN,)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("command_r", ("<|START_ACTION|>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("phi4_mini", ("<|tool|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("jamba", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
    ("granite", ("<|tool_call|>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("ipython", '"parameters"')),
    ("pythonic", ("<|python_start|>",)),
    ("xlam", ("a single JSON array",)),
)
"""Strings in the templates of each format; the first format with all strings present matches."""
