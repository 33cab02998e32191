from typing import Any

from server.generate.conversation import with_tools_as_text

WEATHER = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_tools_are_described_after_the_system_message() -> None:
    turns = with_tools_as_text([turn("system", "Be brief."), turn("user", "hello")], [WEATHER])
    assert [each["role"] for each in turns] == ["system", "user"]
    assert turns[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert '{"type": "function", "function": {"name": "get_weather"}}' in turns[0]["content"]
    assert turns[1] == turn("user", "hello")


def test_calls_and_results_become_text_in_alternating_turns() -> None:
    turns = with_tools_as_text(
        [
            turn("system", "Be brief."),
            turn("user", "weather?"),
            turn("assistant", "Let me see.", tool_calls=[CALL, CALL]),
            turn("tool", "sun", tool_call_id="a"),
            turn("tool", "rain", tool_call_id="b"),
            turn("user", "and now?"),
        ],
        [WEATHER],
    )
    assert [each["role"] for each in turns] == ["system", "user", "assistant", "user"]
    assert turns[2] == turn("assistant", f"Let me see.\n{WRITTEN}\n{WRITTEN}")
    assert turns[3]["content"] == (
        "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>\nand now?"
    )


def test_consecutive_user_messages_stay_separate() -> None:
    turns = with_tools_as_text([turn("user", "one"), turn("user", "two")], [WEATHER])
    assert [each["content"] for each in turns[1:]] == ["one", "two"]
