from datetime import datetime
from typing import Any

import msgspec
import pytest

from server.text.chat_template import ChatTemplate, Rendering, TemplateFailed

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    given = {"messages": messages, "add_generation_prompt": True, **options}
    return template.render(Rendering(**given))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{{ messages[0]['role'] }}", "user"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% generation %}{{ 'x' }}{% endgeneration %}y", "xy"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("{% if x is defined %}{{ x }}{% endif %}", ""),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_templates_have_expected_functions(source: str, text: str) -> None:
    assert render(source) == text


def test_arguments_tools_and_documents_reach_the_template() -> None:
    source = "{{ thinking }} {{ tools[0].name }} {{ documents[0].title }}"
    text = render(
        source, tools=[{"name": "t"}], documents=[{"title": "d"}], arguments={"thinking": False}
    )
    assert text == "False t d"


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developer_role_becomes_system_if_unknown_to_template(source: str, role: str) -> None:
    assert render(source, [{"role": "developer", "content": ""}]) == role


def test_continued_final_message_ends_at_its_content() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}!"
    messages = [USER, {"role": "assistant", "content": "so "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == "[hi][so "
    assert messages[1]["content"] == "so "
    with pytest.raises(TemplateFailed, match="final message"):
        render("nothing", messages, **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "has no attribute|undefined|has no element"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_template_failures_report_reason(source: str, message: str) -> None:
    with pytest.raises(TemplateFailed, match=message):
        render(source)


SHOWS_ALL = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
)


def turns(text: str) -> list[dict[str, str]]:
    """Return messages from their roles' first letters and contents."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[each[0]], "content": each[1:]} for each in text.split()]


@pytest.mark.parametrize(
    ("source", "messages", "shown"),
    [
        (SHOWS_ALL, "s1 d2 u3", "[system:1\n\n2][user:3]"),
        (SHOWS_ALL, "u1 s2 u3", "[user:1][system:2][user:3]"),
        (FIRST_ONLY, "s0 u1 s2", "[system:0][user:1\n\n2]"),
        (FIRST_ONLY, "u1 a2 s3 u4", "[user:1][assistant:2][user:3\n\n4]"),
        (FIRST_ONLY, "u1 a2 t3 s4", "[user:1][assistant:2][tool:3\n\n4]"),
        (FIRST_ONLY, "u1 a2 d3 a4", "[user:1][assistant:2][user:3][assistant:4]"),
    ],
)
def test_system_messages_are_merged_for_templates_with_one(
    source: str, messages: str, shown: str
) -> None:
    assert render(source, turns(messages)) == shown


def test_conversation_with_tools_uses_tool_template() -> None:
    template = ChatTemplate("plain", {}, "{{ tools[0].name }}")
    plain = Rendering(messages=turns("u1"), add_generation_prompt=True)
    assert template.render(plain) == "plain"
    assert template.render(msgspec.structs.replace(plain, tools=[{"name": "f"}])) == "f"
    assert template.shows_tools
