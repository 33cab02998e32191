"""Fields that change the output or its form work as in the reference implementations."""

import asyncio
import string
from typing import Any

import msgspec
import pytest

from engine.shared.config import ModelConfig
from engine.shared.messages import RequestOutput, RequestTiming
from server.answer.formats import AnswerFormats
from server.answer.tool_choice import ToolUse
from server.config import FrontEndConfig, HttpConfig
from server.config.answer import AnswerConfig
from server.generate.conversation import rendered
from server.generate.grammar_check import GrammarCheck
from server.generate.model import ServedModel
from server.generate.request import Conversation
from server.limits import MAX_ECHO
from server.schema.messages import ChatMessage
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import Http, app_of, tokenizer_with

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
def test_each_chunk_has_its_usage_on_request(http: Any, path: str, body: Any) -> None:
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


def test_logprobs_name_tokens_by_id(http: Any) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    choice = http.complete(logprobs=2, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert all(
        name.startswith("token_id:") for each in choice["logprobs"]["top_logprobs"] for name in each
    )
    choice = http.chat(logprobs=True, top_logprobs=2, **fields)["choices"][0]
    names = [each["token"] for each in choice["logprobs"]["content"]]
    assert names == [f"token_id:{each}" for each in choice["token_ids"]]


def test_operator_can_make_logprobs_name_tokens_by_id(http_of: Any) -> None:
    settings = HttpConfig(return_tokens_as_token_ids=True)
    http = http_of(FrontEndConfig(model=ModelConfig(model="tiny"), http=settings))
    for asked, by_id in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
        (name, *_) = http.complete(logprobs=1, **asked)["choices"][0]["logprobs"]["tokens"]
        assert name.startswith("token_id:") is by_id
        choice = http.chat(logprobs=True, **asked)["choices"][0]
        assert choice["logprobs"]["content"][0]["token"].startswith("token_id:") is by_id


def test_logprobs_include_named_token_ids(http: Any) -> None:
    named, fields = [7, 3, 300], {"return_tokens_as_token_ids": True, "max_tokens": 2}
    choice = http.chat(logprobs=True, logprob_token_ids=named, **fields)["choices"][0]
    for each in choice["logprobs"]["content"]:
        tops = [top["token"] for top in each["top_logprobs"]]
        assert tops == [each["token"], *[f"token_id:{i}" for i in named]]
    choice = http.complete(logprobs=0, logprob_token_ids=named, **fields)["choices"][0]
    scores = choice["logprobs"]
    for token, shown in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert list(shown) == [token, *[f"token_id:{i}" for i in named]]


@pytest.mark.parametrize("source", ["text", "ids"])
def test_prompt_is_truncated_at_requested_side(
    http: Any, engines: Any, tokenizer: Any, source: str
) -> None:
    text = "the quick brown fox jumps"
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = text if source == "text" else ids
    for side, keep, kept in (
        ("left", 3, ids[-3:]), ("right", 3, ids[:3]), (None, 3, ids[-3:]),
        (None, -1, ids), (None, 99, ids),
    ):  # fmt: skip
        http.complete(prompt=prompt, truncate_prompt_tokens=keep, truncation_side=side)
        assert engines.streams[-1].prompt_token_ids == kept


def test_beginning_of_very_long_text_is_kept(http: Any, engines: Any, tokenizer: Any) -> None:
    text = string.ascii_lowercase * 20_000
    http.complete(prompt=text, truncate_prompt_tokens=7, truncation_side="right", max_tokens=1)
    assert (
        engines.streams[-1].prompt_token_ids
        == tokenizer.encode(text[:100], add_special_tokens=False)[:7]
    )


def test_minus_one_requests_all_log_probabilities(http: Any, http_of: Any, tokenizer: Any) -> None:
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


def test_all_log_probabilities_count_against_answer_budget(http_of: Any) -> None:
    body = {"prompt": "hello", "logprobs": -1, "max_tokens": 400, "n": 4}
    answer = all_logprobs(http_of).post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


def test_echoed_answer_starts_with_assistant_message(http: Any, engines: Any) -> None:
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


def test_echo_in_many_choices_is_bounded(http: Any) -> None:
    said = {"role": "assistant", "content": "x" * (MAX_ECHO // 128 + 1)}
    body = {"messages": [USER, said], "echo": True, "n": 128}
    answer = http.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("echo", "messages")


def test_structured_outputs_apply_to_responses(http: Any, engines: Any) -> None:
    constraint = {"choice": ["hello", "again"]}
    body = {"input": "hello", "structured_outputs": constraint, "logit_bias": {"5": 1}}
    assert http.post("/v1/responses", body).status_code == 200
    sampling = engines.streams[-1].sampling
    assert sampling.grammar.choices == ("hello", "again")
    assert sampling.logit_bias == {5: 1.0}
    form = {"format": {"type": "json_object"}}
    answer = http.post("/v1/responses", {**body, "text": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


def test_completions_accept_max_completion_tokens(http: Any, engines: Any) -> None:
    http.complete(max_completion_tokens=7)
    assert engines.streams[-1].sampling.max_tokens == 7
    http.complete(max_completion_tokens=7, max_tokens=3)
    assert engines.streams[-1].sampling.max_tokens == 3


TOOL = {"type": "function", "function": {"name": "f"}}
FORCED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "verbosity": "low"}),
        ("/v1/responses", {"input": "hello", "text": {"verbosity": "low"}}),
    ],
)
def test_a_chat_template_gets_the_verbosity(
    config: Any, engines: Any, backend: Any, path: str, body: dict[str, Any]
) -> None:
    tokenizer = tokenizer_with(backend, "{{ verbosity }}")
    http = Http(app_of(config, engines, tokenizer))
    assert http.post(path, {"model": "tiny", **body}).status_code == 200
    [stream] = engines.streams
    assert tokenizer.decode(stream.prompt_token_ids, skip_special_tokens=False) == "low"
    wrong = http.post("/v1/responses", {"input": "hello", "text": {"verbosity": "enormous"}})
    assert wrong.json()["error"]["param"] == "text.verbosity"


@pytest.mark.parametrize("field", ["both", "reasoning", "reasoning_content"])
def test_reasoning_is_returned_under_configured_names(
    http_of: Any, engines: Any, field: Any
) -> None:
    answers = AnswerConfig(reasoning_parser="qwen3", reasoning_field=field)
    http = http_of(FrontEndConfig(model=ModelConfig(model="tiny"), answer=answers))
    engines.script = engines.answer("<think>\nhello\n</think>\n\nagain")
    names = {"reasoning", "reasoning_content"} if field == "both" else {field}
    fields = {"max_tokens": 100, "messages": [USER]}
    message = http.chat(**fields)["choices"][0]["message"]
    assert {name: message[name] for name in names} == dict.fromkeys(names, "hello")
    assert names == {name for name in message if name.startswith("reasoning")}
    chunks = http.stream("/v1/chat/completions", fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    shown = {name for delta in deltas for name in delta if name.startswith("reasoning")}
    assert shown == names
    for name in names:
        assert "".join(delta.get(name, "") for delta in deltas) == "hello"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_templates_get_reasoning_under_both_names(sent: str, read: str, tokenizer: Any) -> None:
    said = ChatMessage.model_validate({"role": "assistant", "content": "x", sent: "hm"})
    template = ChatTemplate("{% for m in messages %}{{ m." + read + " }}{% endfor %}", {})
    reads = ServedTokenizer(tokenizer.backend, eos_token_ids=[0], chat_template=template)
    model = ServedModel(reads, AnswerFormats(), GrammarCheck(), None)
    source = Conversation(messages=[said], add_generation_prompt=False)
    assert asyncio.run(rendered(source, ToolUse(), model)) == "hm"


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_the_first_chunk_contains_the_prompt(http: Any, engines: Any, options: Any) -> None:
    body = {"messages": [USER], "return_token_ids": True, "stream_options": options, "n": 2}
    chunks = [c for c in http.stream("/v1/chat/completions", body) if c["choices"]]
    shown = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in shown] == [0, 1]
    assert all(c["prompt_token_ids"] == engines.streams[-1].prompt_token_ids for c in shown)
    assert all(chunk["choices"][0]["delta"].get("role") for chunk in shown)
    assert all(("usage" in chunk) == (options is not None) for chunk in chunks)


@pytest.mark.parametrize("timed", [False, True])
def test_answers_contain_timing_if_configured(http_of: Any, engines: Any, timed: bool) -> None:
    answer = engines.answer("hello world")

    def script(stream: Any) -> Any:
        timing = RequestTiming(queue=0.5, prefill=0.25, decode=0.75)
        return [msgspec.structs.replace(output, timing=timing) for output in answer(stream)]

    engines.script = script
    settings = HttpConfig(enable_per_request_metrics=timed)
    http = http_of(FrontEndConfig(model=ModelConfig(model="tiny"), http=settings))
    options = {"include_usage": True}
    for path, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ):
        whole = http.post(path, body).json()
        streamed = http.stream(path, {**body, "stream_options": options})[-1]
        for shown in (whole, streamed):
            tokens = shown["usage"]["completion_tokens"]
            assert tokens > 1
            assert shown.get("metrics") == (
                {
                    "time_to_first_token_ms": 250,
                    "generation_time_ms": 750,
                    "queue_time_ms": 500,
                    "mean_itl_ms": 750 / (tokens - 1),
                    "tokens_per_second": tokens,
                }
                if timed
                else None
            )
        assert "metrics" not in http.post(path, {**body, "n": 2}).json(), "whose would they be?"


def test_a_single_token_has_no_time_between_tokens(http_of: Any, engines: Any) -> None:
    def script(stream: Any) -> Any:
        return [RequestOutput(stream.id, [1], "stop", timing=RequestTiming(0.5, 0.25, 0.0))]

    engines.script = script
    http = http_of(
        FrontEndConfig(
            model=ModelConfig(model="tiny"), http=HttpConfig(enable_per_request_metrics=True)
        )
    )
    assert http.chat()["metrics"] == {
        "time_to_first_token_ms": 250,
        "generation_time_ms": 0,
        "queue_time_ms": 500,
        "tokens_per_second": 4,
    }
