import pytest

from server.answer.config import AnswerConfig
from server.answer.formats import BadFormats, answer_formats
from server.tool_calls.formats import CALL_FORMATS, OF_FAMILY


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
def test_the_template_then_the_family_say_how_calls_are_written(
    template: str, shows_tools: bool, family: str, name: str, tells: bool
) -> None:
    formats = answer_formats(AnswerConfig(), template, shows_tools=shows_tools, family=family)
    assert formats.calls is CALL_FORMATS[name]
    assert formats.tells_tools is tells


def test_the_operator_has_the_last_word() -> None:
    formats = answer_formats(AnswerConfig(tool_call_parser="mistral"), "<tool_call>")
    assert formats.calls is CALL_FORMATS["mistral"]
    assert answer_formats(AnswerConfig(tool_call_parser="none"), "<tool_call>").calls is None
    assert answer_formats(AnswerConfig(), None).calls is None


def test_families_have_formats_that_exist() -> None:
    assert set(OF_FAMILY.values()) <= CALL_FORMATS.keys()


def test_channels_carry_reasoning_and_calls_alike() -> None:
    formats = answer_formats(AnswerConfig(reasoning_parser="openai_gptoss"), "")
    assert formats.calls is CALL_FORMATS["openai"]
    assert formats.reasoning is CALL_FORMATS["openai"].channels
    with pytest.raises(BadFormats, match="openai_gptoss"):
        answer_formats(
            AnswerConfig(reasoning_parser="openai_gptoss", tool_call_parser="hermes"), ""
        )
