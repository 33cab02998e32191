import pytest

from server.answer.parts import ContentText, Message, whole_message
from server.answer.reader import AnswerReader
from server.answer.reasoning import REASONING_FORMATS, THINK, ReasoningReader


def read(text: str, *, inside: bool) -> Message:
    reader = AnswerReader(ReasoningReader(THINK, inside=inside), None)
    whole = whole_message(reader.push(text) + reader.finish())
    reader = AnswerReader(ReasoningReader(THINK, inside=inside), None)
    pieces = [part for character in text for part in reader.push(character)]
    assert whole_message(pieces + reader.finish()) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("\n<think>hm</think>Yes.\n", False, "hm", "Yes.\n"),
        ("no thoughts", False, None, "no thoughts"),
        (" <b>no</b> thoughts", False, None, " <b>no</b> thoughts"),
        ("hm\n\nhm</think>Yes.", True, "hm\n\nhm", "Yes."),
        ("<think>hm</think>Yes.", True, "hm", "Yes."),
        ("never closed\n", True, "never closed", None),
        ("<think>a</thin", False, "a</thin", None),
        ("<think></think>\n", False, None, None),
        ("<th", False, None, "<th"),
        ("a</think>b<think>c</think>", True, "a", "b<think>c</think>"),
        ("a </think> b", True, "a ", " b"),
    ],
)
def test_reasoning_is_split_off(
    text: str, inside: bool, reasoning: str | None, content: str | None
) -> None:
    assert read(text, inside=inside) == Message(reasoning, content, [])


@pytest.mark.parametrize(
    ("parser", "prompt", "answer", "content"),
    [
        ("qwen3", "<user>hi<assistant>\n", "a</think>b", "a</think>b"),
        ("qwen3", "<user>hi<assistant><think>\n", "a</think>b", "b"),
        ("qwen3", "hi<assistant><think>\n\n</think>\n\n", "<think>a</think>", "<think>a</think>"),
        ("deepseek_r1", "<user>hi<assistant>", "a</think>b", "b"),
        ("mistral", "<user>hi", "[THINK]a[/THINK]b", "b"),
    ],
)  # fmt: skip
def test_prompt_determines_whether_answer_starts_in_reasoning(
    parser: str, prompt: str, answer: str, content: str
) -> None:
    tags = REASONING_FORMATS[parser]
    inside = tags.opening(prompt, continues=False)
    reasoning = None if inside is None else ReasoningReader(tags, inside=inside)
    reader = AnswerReader(reasoning, None)
    assert whole_message(reader.push(answer) + reader.finish()).content == content


@pytest.mark.parametrize(
    ("prompt", "reasons"),
    [("<think>so far", True), ("<think>a</think>so far", False), ("so far", False)],
)
def test_continued_message_resumes_in_its_current_part(prompt: str, reasons: bool) -> None:
    assert THINK.opening(prompt, continues=True) == (True if reasons else None)


def test_reasoning_is_streamed() -> None:
    reader = AnswerReader(ReasoningReader(THINK, inside=True), None)
    assert whole_message(reader.push("so far so good ")).reasoning == "so far so good "
    assert reader.push("</think>\n\nNow") == [ContentText("Now")]
