from typing import Any

import pytest

from tests.server.conftest import prompt_of

TEXT = "hello 你好 world 🙂"


def test_a_chat_completion_has_a_message(http: Any, engines: Any) -> None:
    body = http.chat()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"content": "hello world", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert prompt_of(engines) == "<|user|>hello<|end|><|assistant|>"
    length = len(engines.streams[0].prompt_token_ids)
    assert engines.streams[0].sampling.max_tokens == 512 - length


@pytest.mark.parametrize("seed", range(3))
def test_stream_adds_up_to_the_full_answer(http: Any, engines: Any, seed: int) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 100}
    engines.script = engines.answer(TEXT, cut=engines.random_cuts(seed))
    whole = http.chat(**fields)
    engines.script = engines.answer(TEXT, cut=engines.random_cuts(seed + 50))
    events = http.stream(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "stream_options": {"include_usage": True},
            **fields,
        },
    )
    first, *chunks, last = events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = whole["choices"][0]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == expected["message"]["content"] == TEXT
    scores = [score for choice in choices for score in choice["logprobs"]["content"]]
    assert scores == expected["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"]


def test_logprobs_name_tokens_and_their_bytes(http: Any, engines: Any) -> None:
    engines.script = engines.answer("é 🙂")
    content = http.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    *spelled, end = content
    assert bytes(byte for score in spelled for byte in score["bytes"]).decode() == "é 🙂"
    assert end["token"] == "<|eos|>"
    assert all(len(score["top_logprobs"]) == 2 for score in content)
    content = http.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(score["top_logprobs"] == [] for score in content)


def test_text_parts_are_joined_and_roles_rendered(http: Any, engines: Any) -> None:
    http.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "call-1"},
        ]
    )
    assert prompt_of(engines) == (
        "<|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|><|end|><|tool|>42<|end|>"
        "<|assistant|>"
    )


def test_the_final_message_can_be_continued(http: Any, engines: Any) -> None:
    http.chat(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure: "}],
        continue_final_message=True,
    )
    assert prompt_of(engines) == "<|user|>hi<|end|><|assistant|>Sure: "


def test_generation_prompt_can_be_omitted(http: Any, engines: Any) -> None:
    http.chat(add_generation_prompt=False)
    assert prompt_of(engines) == "<|user|>hello<|end|>"


def test_max_completion_tokens_wins(http: Any, engines: Any) -> None:
    http.chat(max_tokens=3, max_completion_tokens=5)
    assert engines.streams[0].sampling.max_tokens == 5


def test_earlier_refusals_are_rendered_as_assistant_content(http: Any, engines: Any) -> None:
    question = {"role": "user", "content": "why?"}
    expected = None
    for refused in (
        {"content": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"refusal": "I cannot."},
    ):
        http.chat(messages=[question, {"role": "assistant", **refused}, question])
        expected = expected or engines.streams[-1].prompt_token_ids
        assert engines.streams[-1].prompt_token_ids == expected
    item = {"type": "message", "role": "assistant", "content": [
        {"type": "refusal", "refusal": "I cannot."}
    ]}  # fmt: skip
    response = http.post("/v1/responses", {"input": [question, item, question]})
    assert response.status_code == 200, response.text
    assert engines.streams[-1].prompt_token_ids == expected


def test_a_function_role_is_a_tool(http: Any, engines: Any) -> None:
    question = {"role": "user", "content": "how warm?"}
    for role in ("function", "tool"):
        http.chat(messages=[question, {"role": role, "name": "thermometer", "content": "21"}])
    first, second = engines.streams
    assert first.prompt_token_ids == second.prompt_token_ids


def test_unrequested_fields_are_null_in_body(http: Any) -> None:
    body = http.chat()
    assert body["prompt_token_ids"] is None
    assert body["prompt_logprobs"] is None
    assert body["choices"][0]["token_ids"] is None


def test_custom_roles_of_template_are_passed_on(http: Any, engines: Any) -> None:
    parts = [{"type": "text", "text": "b"}]
    http.chat(messages=[{"role": "critic", "content": "a"}, {"role": "critic", "content": parts}])
    assert prompt_of(engines) == "<|critic|>a<|end|><|critic|>b<|end|><|assistant|>"


def test_role_chunk_counts_no_tokens(http: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, second, *_ = http.stream(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}], "stream_options": options},
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["usage"]["completion_tokens"] == 0
    assert second["usage"]["completion_tokens"] > 0
