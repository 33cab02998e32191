"""Several conversations in one request."""

from typing import Any

import pytest

PATH = "/v1/chat/completions/batch"


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def test_choices_are_in_order_of_conversations(http: Any, engines: Any) -> None:
    scripts = [engines.answer("hello world"), engines.answer("hello again")]
    engines.script = lambda stream: scripts[len(engines.streams) - 1](stream)
    conversations = [[said("one")], [said("be brief", "system"), said("two")]]
    answer = http.post(PATH, {"messages": conversations, "max_tokens": 50, "logprobs": True})
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert body["object"] == "chat.completion"
    shown = [(each["index"], each["message"]["content"]) for each in body["choices"]]
    assert shown == [(0, "hello world"), (1, "hello again")]
    prompts = [
        engines.tokenizer.decode(stream.prompt_token_ids, skip_special_tokens=False)
        for stream in engines.streams
    ]
    assert prompts == [
        "<|user|>one<|end|><|assistant|>",
        "<|system|>be brief<|end|><|user|>two<|end|><|assistant|>",
    ]
    tokens = sum(len(each["logprobs"]["content"]) for each in body["choices"])
    assert body["usage"]["completion_tokens"] == tokens
    assert body["usage"]["prompt_tokens"] == sum(len(s.prompt_token_ids) for s in engines.streams)


@pytest.mark.slow  # starts the process that checks grammars
def test_response_format_applies_to_all_conversations(http: Any, engines: Any) -> None:
    form = {"regex": "hello.*"}
    body = {"messages": [[said("one")]] * 3, "structured_outputs": form}
    assert http.post(PATH, body).status_code == 200
    grammars = [stream.sampling.grammar for stream in engines.streams]
    assert len(grammars) == 3
    assert None not in grammars


@pytest.mark.parametrize("field", ["documents", "chat_template_kwargs"])
def test_shared_parts_of_conversations_are_bounded(http: Any, field: str) -> None:
    text = {"text": "x" * 10_000}
    shared = [text] if field == "documents" else text
    for count, status in ((2, 200), (1000, 400)):
        body = {"messages": [[said("x")]] * count, field: shared}
        answer = http.post(PATH, body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["param"] == field
