import ast
import importlib.util
from pathlib import Path

import pytest
from llguidance import LLMatcher

from engine.shared.messages import LarkGrammar
from engine.shared.plugins import BadPlugin
from server.answer.call_formats import CALL_FORMATS, CallFormat, CallSyntax, call_format
from server.answer.calls import CallStyle
from server.answer.formats import BadFormats, answer_formats
from server.answer.parts import AnswerParser
from server.answer.reasoning import REASONING_FORMATS, ReasoningTags
from server.answer.tool_choice import tool_use
from server.config.answer import AnswerConfig
from server.schema.tools import Tool
from server.text.sampling_defaults import preset_of, presets
from tests.support.plugins import offer


@pytest.mark.parametrize(
    ("template", "shows_tools", "family", "name", "tells"),
    [
        ("{{ tools }}<tool_call>", True, "llama", "hermes", False),
        ("{{ tools }}", True, "granite", "granite", False),
        ("{{ tools }}", True, "unheard_of", "hermes", True),
        ("{{ messages }}", False, "granite", "hermes", True),
        ("<|channel|>analysis<|message|>", True, "gpt_oss", "openai", False),
    ],
)
def test_call_format_follows_template_then_family(
    template: str, shows_tools: bool, family: str, name: str, tells: bool
) -> None:
    preset = preset_of(family, "")
    formats = answer_formats(AnswerConfig(), template, shows_tools=shows_tools, preset=preset)
    assert formats.calls is CALL_FORMATS[name]
    assert formats.describes_tools is tells


def test_the_template_of_llama_4_asks_for_json() -> None:
    """vllm-project/vllm#16214: the family's other template asks for Python."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).with_name("models") / "llama4" / "processing_llama4.py"
    template = next(
        ast.literal_eval(line.value)
        for line in ast.parse(file.read_text("utf-8")).body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "chat_template"
    )
    preset = preset_of("llama4", "")
    formats = answer_formats(AnswerConfig(), template, shows_tools=True, preset=preset)
    assert formats.call_parser == "llama3_json"


def test_operator_setting_overrides_detected_format() -> None:
    formats = answer_formats(AnswerConfig(tool_call_parser="mistral"), "<tool_call>")
    assert formats.calls is CALL_FORMATS["mistral"]
    assert answer_formats(AnswerConfig(tool_call_parser="none"), "<tool_call>").calls is None
    assert answer_formats(AnswerConfig(), None).calls is None


def test_presets_name_existing_formats() -> None:
    known = presets()
    assert {each.tool_call_parser for each in known} <= {None, *CALL_FORMATS}
    assert {each.reasoning_parser for each in known} <= {None, *REASONING_FORMATS}
    preset = preset_of("qwen2", "DeepSeek-R1-Distill-Qwen-7B")
    formats = answer_formats(AnswerConfig(), "{{ messages }}", preset=preset)
    assert formats.reasoning_parser == "deepseek_r1"


def test_channels_contain_reasoning_and_calls() -> None:
    formats = answer_formats(AnswerConfig(reasoning_parser="openai_gptoss"), "")
    assert formats.calls is CALL_FORMATS["openai"]
    assert formats.reasoning is CALL_FORMATS["openai"].channels
    with pytest.raises(BadFormats, match="openai_gptoss"):
        answer_formats(
            AnswerConfig(reasoning_parser="openai_gptoss", tool_call_parser="hermes"), ""
        )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m }}</think>", "qwen3"),
        ("[THINK] [/THINK]", "mistral"),
        ("<|END_THINKING|>", "command_r"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("{{ messages }}", "none"),
        (None, "none"),
    ],
)
def test_reasoning_tags_follow_template(
    template: str | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        formats = answer_formats(AnswerConfig(), template)
    assert formats.reasoning_parser == name
    assert formats.reasoning is REASONING_FORMATS.get(name)
    assert f"reasoning: {name} (" in caplog.text


def test_reasoning_can_be_turned_off() -> None:
    formats = answer_formats(AnswerConfig(reasoning_parser="none"), "</think>")
    assert formats.reasoning is None


BRACES = call_format(CallStyle(starts=("<<",), ends=(">>",), only_known=True))
MUSING = ReasoningTags("<muse>", "</muse>")


def test_formats_can_be_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path / "1", "swell.tool_call_parsers", braces=f"{__name__}:BRACES")
    offer(tmp_path / "2", "swell.reasoning_parsers", musing=f"{__name__}:MUSING")
    monkeypatch.syspath_prepend(tmp_path / "1")
    monkeypatch.syspath_prepend(tmp_path / "2")
    config = AnswerConfig(tool_call_parser="braces", reasoning_parser="musing")
    formats = answer_formats(config, "")
    assert (formats.calls, formats.reasoning) == (BRACES, MUSING)
    assert (formats.call_parser, formats.reasoning_parser) == ("braces", "musing")
    with pytest.raises(BadPlugin, match="--reasoning-parser braces"):
        answer_formats(AnswerConfig(reasoning_parser="braces"), "")


BRACKETS = call_format(
    CallStyle(starts=("[CALL]",), ends=("[/CALL]",)),
    CallSyntax('[CALL]{"name": {name}, "arguments": ', "}[/CALL]", "\n"),
)


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_that_no_grammar_can_name_do_not_break_forced_calls(
    special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(tmp_path, "swell.tool_call_parsers", brackets=f"{__name__}:BRACKETS")
    monkeypatch.syspath_prepend(tmp_path)
    formats = answer_formats(
        AnswerConfig(tool_call_parser="brackets"),
        "",
        is_special=lambda text: special and text == "[CALL]",
    )
    assert ("[CALL]" in caplog.text) is special
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    use = tool_use([tool], "required", formats, parallel=True)
    grammar = use.grammar(None, lambda text: special and text == "[CALL]")
    assert isinstance(grammar, LarkGrammar)
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text))


def _fails(_: object) -> AnswerParser:
    raise RuntimeError("it has its reasons")


FAILING = CallFormat(parser=_fails, syntax=None)
ENDLESS = ReasoningTags("<muse>", "")


def test_plugins_that_would_fail_in_every_request_are_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "1", "swell.tool_call_parsers", failing=f"{__name__}:FAILING")
    offer(tmp_path / "2", "swell.reasoning_parsers", endless=f"{__name__}:ENDLESS")
    monkeypatch.syspath_prepend(tmp_path / "1")
    monkeypatch.syspath_prepend(tmp_path / "2")
    with pytest.raises(BadPlugin, match=r"--tool-call-parser failing: .*its reasons"):
        answer_formats(AnswerConfig(tool_call_parser="failing"), "")
    with pytest.raises(BadPlugin, match=r"--reasoning-parser endless: .*two texts"):
        answer_formats(AnswerConfig(reasoning_parser="endless"), "")
