"""Fields of vLLM's servers that change what is generated or shown are honoured."""

import string
from typing import Any

import pytest

from server.config import FrontEndConfig, HttpConfig, ModelConfig
from server.limits import MAX_ECHO

USER = {"role": "user", "content": "hello"}


def all_logprobs(http_of: Any) -> Any:
    return http_of(
        FrontEndConfig(model=ModelConfig(model="tiny"), http=HttpConfig(max_logprobs=-1))
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["hello", "the fox jumps"], "n": 2}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ],
)
def test_each_chunk_tells_its_usage_if_that_is_wanted(http: Any, path: str, body: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = http.stream(path, {**body, "max_tokens": 5, "stream_options": options})
    assert all(chunk["usage"] for chunk in chunks)
    ends = {c["choices"][0]["index"]: c["usage"] for c in chunks if c["choices"]}
    spent = sum(usage["completion_tokens"] for usage in ends.values())
    assert spent == last["usage"]["completion_tokens"] > 0
    for usage in ends.values():
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not any(
        chunk.get("usage") for chunk in http.stream(path, {**body, "stream_options": options})
    )


def test_scores_name_tokens_by_their_ids(http: Any) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    choice = http.complete(logprobs=2, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert all(
        name.startswith("token_id:") for each in choice["logprobs"]["top_logprobs"] for name in each
    )
    choice = http.chat(logprobs=True, top_logprobs=2, **fields)["choices"][0]
    names = [each["token"] for each in choice["logprobs"]["content"]]
    assert names == [f"token_id:{each}" for each in choice["token_ids"]]


@pytest.mark.parametrize("source", ["text", "ids"])
def test_a_prompt_is_cut_at_the_side_that_is_named(
    http: Any, engines: Any, tokenizer: Any, source: str
) -> None:
    text = "the quick brown fox jumps"
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = text if source == "text" else ids
    for side, kept in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[-3:])):
        http.complete(prompt=prompt, truncate_prompt_tokens=3, truncation_side=side)
        assert engines.streams[-1].prompt_token_ids == kept


def test_of_a_very_long_text_the_beginning_is_kept(http: Any, engines: Any, tokenizer: Any) -> None:
    text = string.ascii_lowercase * 20_000
    http.complete(prompt=text, truncate_prompt_tokens=7, truncation_side="right", max_tokens=1)
    assert (
        engines.streams[-1].prompt_token_ids
        == tokenizer.encode(text[:100], add_special_tokens=False)[:7]
    )


def test_minus_one_asks_for_all_log_probabilities(http: Any, http_of: Any, tokenizer: Any) -> None:
    size, free = tokenizer.vocab_size, all_logprobs(http_of)
    for http_with, status in ((http, 400), (free, 200)):
        for path, fields, name in (
            ("/v1/completions", {"prompt": "hello", "logprobs": -1}, "logprobs"),
            (
                "/v1/chat/completions",
                {"messages": [USER], "logprobs": True, "top_logprobs": -1},
                "top_logprobs",
            ),
            ("/v1/completions", {"prompt": "hello", "prompt_logprobs": -1}, "prompt_logprobs"),
        ):
            answer = http_with.post(path, {**fields, "max_tokens": 2})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == name
    top = free.chat(logprobs=True, top_logprobs=-1, max_tokens=1)["choices"][0]["logprobs"]
    assert len(top["content"][0]["top_logprobs"]) == size


def test_all_log_probabilities_are_within_the_budget_of_an_answer(http_of: Any) -> None:
    body = {"prompt": "hello", "logprobs": -1, "max_tokens": 400, "n": 4}
    answer = all_logprobs(http_of).post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


def test_an_answer_begins_with_what_the_assistant_said(http: Any, engines: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    fields: dict[str, Any] = {
        "messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 100
    }  # fmt: skip
    engines.script = engines.answer("hello again")
    assert http.chat(**fields)["choices"][0]["message"]["content"] == "Sure: hello again"
    chunks = http.stream("/v1/chat/completions", fields)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Sure: hello again"
    alone = http.chat(**{**fields, "messages": [USER], "continue_final_message": False})
    assert alone["choices"][0]["message"]["content"] == "hello again"


def test_an_echo_in_many_answers_is_bounded(http: Any) -> None:
    said = {"role": "assistant", "content": "x" * (MAX_ECHO // 128 + 1)}
    body = {"messages": [USER, said], "echo": True, "n": 128}
    answer = http.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("echo", "messages")


def test_a_response_is_held_to_structured_outputs(http: Any, engines: Any) -> None:
    constraint = {"choice": ["hello", "again"]}
    body = {"input": "hello", "structured_outputs": constraint, "logit_bias": {"5": 1}}
    assert http.post("/v1/responses", body).status_code == 200
    sampling = engines.streams[-1].sampling
    assert sampling.grammar.choices == ("hello", "again")
    assert sampling.logit_bias == {5: 1.0}
    form = {"format": {"type": "json_object"}}
    answer = http.post("/v1/responses", {**body, "text": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


def test_completions_know_the_newer_name_of_max_tokens(http: Any, engines: Any) -> None:
    http.complete(max_completion_tokens=7)
    assert engines.streams[-1].sampling.max_tokens == 7
    http.complete(max_completion_tokens=7, max_tokens=3)
    assert engines.streams[-1].sampling.max_tokens == 3
