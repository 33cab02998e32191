"""A conversation: requests sent, history stored, and answers displayed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server.clients import chat
from server.clients.chat import Conversation, ServerRefused, find_model, stream_answer
from server.clients.chat_config import ChatConfig, ChatSection


def _client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")


def _events(*chunks: Any) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return httpx.Response(200, content="".join(lines))


def _delta(reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": reason}]}


def test_a_request_holds_the_system_prompt_and_all_turns() -> None:
    conversation = Conversation("Be brief.")
    conversation.add_user("one")
    conversation.answered("1")
    conversation.add_user("two")
    body = conversation.body("m", ChatSection(max_tokens=5, temperature=0))
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
    ]
    assert (body["max_completion_tokens"], body["temperature"]) == (5, 0)
    assert "temperature" not in conversation.body("m", ChatSection())


def test_unanswered_question_is_removed() -> None:
    conversation = Conversation(None)
    conversation.add_user("one")
    conversation.answered("")
    assert conversation.messages == []


def test_streamed_pieces_have_their_kind() -> None:
    answer = _events(
        _delta(reasoning_content="hm"), _delta(content="yes"), _delta("stop"), {"choices": []}
    )
    assert list(stream_answer(_client(lambda _: answer), {})) == [
        ("reasoning", "hm"),
        ("content", "yes"),
        ("finish", "stop"),
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(429, json={"error": {"message": "too busy"}}), "too busy"),
        (httpx.Response(502, text="<html>"), "answered 502"),
        (_events({"error": {"message": "engine lost"}}), "engine lost"),
        (httpx.Response(200, text="data: {nonsense\n\n"), "no JSON"),
        (httpx.Response(200, text="data: " + "x" * (1 << 21) + "\n\n"), "too long"),
    ],
)
def test_failed_answer_reports_reason(answer: httpx.Response, reason: str) -> None:
    with pytest.raises(ServerRefused, match=reason):
        list(stream_answer(_client(lambda _: answer), {}))


@pytest.mark.parametrize("body", ['{"data": []}', "[]", "nonsense"])
def test_a_server_without_models_is_refused(body: str) -> None:
    with pytest.raises(ServerRefused, match="lists no models"):
        find_model(_client(lambda _: httpx.Response(200, text=body)))


def _answers(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    said = json.loads(request.content)["messages"]
    if said[-1]["content"] == "fail":
        return httpx.Response(503, json={"error": {"message": "no engine"}})
    return _events(_delta(content=f"{len(said)} "), _delta(content=said[-1]["content"]))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    made = httpx.Client
    transport = httpx.MockTransport(_answers)
    monkeypatch.setattr(httpx, "Client", lambda **options: made(transport=transport, **options))


@pytest.mark.usefixtures("served")
def test_piped_lines_are_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hello", "", "fail", "again", "/clear", "new", "/nope", "/quit", "never"])

    def read(lines: Iterator[str] = lines) -> Callable[[str], str]:
        return lambda prompt: next(lines)

    monkeypatch.setattr("builtins.input", read())
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert chat.chat(ChatConfig()) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line] == ["1 hello", "3 again", "1 new"]
    assert "no engine" in shown.err
    assert "there is no /nope" in shown.err


@pytest.mark.usefixtures("served")
def test_a_quick_message_is_answered_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.chat(ChatConfig(chat=ChatSection(quick="hello"))) == 0
    assert capsys.readouterr().out == "1 hello\n"
    assert chat.chat(ChatConfig(chat=ChatSection(quick="fail"))) == 1
