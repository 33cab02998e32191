from typing import Any

import pytest

from server.router.generation_client import NoEngineAvailable

TEXT = "hello 你好 world, a stream of 🙂🙂"


def test_a_completion_has_text_usage_and_names(http: Any, engines: Any) -> None:
    body = http.complete(prompt="hello", max_tokens=50)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    prompt_tokens = len(engines.streams[0].prompt_token_ids)
    answer_tokens = len(engines.tokenizer.encode("hello world", add_special_tokens=False)) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert engines.streams[0].closed.is_set()


def test_defaults_and_parameters_reach_the_engine(http: Any, engines: Any) -> None:
    http.complete()
    sampling = engines.streams[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert 0 <= sampling.seed < 2**63
    http.complete(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        seed=-5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        logit_bias={"4": -100},
        priority=9,
        user="me",
        unheard_of={"ignored": True},
    )
    stream = engines.streams[1]
    sampling = stream.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.1, -5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.ignore_eos) == (1.5, 2, True)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((3,), {4: -100})
    assert stream.priority == 9


@pytest.mark.parametrize("seed", range(4))
def test_stream_adds_up_to_the_full_answer(http: Any, engines: Any, seed: int) -> None:
    fields = {"prompt": "the fox", "max_tokens": 100, "logprobs": 2, "echo": True, "seed": 1}
    engines.script = engines.answer(TEXT, cut=engines.random_cuts(seed))
    whole = http.complete(**fields)
    engines.script = engines.answer(TEXT, cut=engines.random_cuts(seed + 100))
    events = http.stream("/v1/completions", {**fields, "stream_options": {"include_usage": True}})
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = whole["choices"][0]
    assert "".join(choice["text"] for choice in choices) == expected["text"] == "the fox" + TEXT
    for name, values in expected["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == expected["finish_reason"] == "stop"


def test_incomplete_characters_are_not_sent(http: Any, engines: Any) -> None:
    engines.script = engines.answer("🙂")
    events = http.stream("/v1/completions", {"prompt": "hello"})
    assert [event["choices"][0]["text"] for event in events] == ["🙂", ""]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("hello", 1),
        (["hello", "world"], 2),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
    ],
)
def test_prompts_have_four_forms(http: Any, engines: Any, prompt: Any, count: int) -> None:
    body = http.complete(prompt=prompt)
    assert [choice["index"] for choice in body["choices"]] == list(range(count))
    assert len(engines.streams) == count
    if isinstance(prompt[0], int):
        assert engines.streams[0].prompt_token_ids == prompt
    lengths = [len(stream.prompt_token_ids) for stream in engines.streams]
    assert body["usage"]["prompt_tokens"] == sum(lengths)


def test_choices_sample_with_their_own_seeds(http: Any, engines: Any) -> None:
    body = http.complete(prompt=["hello", "world"], n=2, seed=2**63 - 2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    seeds = [stream.sampling.seed for stream in engines.streams]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    prompts = [stream.prompt_token_ids for stream in engines.streams]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_engines_know_which_sequences_belong_to_one_request(http: Any, engines: Any) -> None:
    http.complete(prompt=["hello", "world"], n=2)
    http.complete(prompt="hello")
    first, *others, alone = engines.streams
    assert [each.group for each in others] == [first.id] * 3
    assert first.group == alone.group == 0


def test_streamed_choices_are_distinguished(http: Any, engines: Any) -> None:
    events = http.stream("/v1/completions", {"prompt": ["hello", "world"], "n": 2})
    texts = dict.fromkeys(range(4), "")
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "hello world")


def test_best_of_returns_most_likely_choices(http: Any, engines: Any) -> None:
    likely = iter([300, 5, 200])

    def script(stream: Any) -> Any:
        token = next(likely)
        return engines.tokens([token], cut=lambda left: left)(stream)

    engines.script = script
    body = http.complete(n=1, best_of=3, max_tokens=1, return_token_ids=True)
    assert [choice["token_ids"] for choice in body["choices"]] == [[5]]
    assert body["choices"][0]["index"] == 0
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 3


def test_echo_with_nothing_to_generate_scores_the_prompt(http: Any, engines: Any) -> None:
    prompt = engines.tokenizer.encode("the quick fox", add_special_tokens=False)
    body = http.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == "the quick fox"
    assert choice["finish_reason"] == "length"
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == "the quick fox"
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(score < 0 for score in scores["token_logprobs"][1:])
    assert [len(alternatives) for alternatives in scores["top_logprobs"][1:]] == [1] * (
        len(prompt) - 1
    )
    starts = [len("".join(scores["tokens"][:i])) for i in range(len(prompt))]
    assert scores["text_offset"] == starts
    assert body["usage"]["completion_tokens"] == 0
    assert engines.streams[0].sampling.max_tokens == 1


def test_zero_logprobs_show_the_drawn_token_only(http: Any) -> None:
    scores = http.complete(logprobs=0)["choices"][0]["logprobs"]
    for token, alternatives in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert list(alternatives) == [token]


def test_a_stop_string_ends_the_answer_and_frees_the_engine(http: Any, engines: Any) -> None:
    engines.script = engines.answer("hello world, hello again")
    body = http.complete(stop=["again", ", h"], max_tokens=50)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "stop")
    assert choice["stop_reason"] == ", h"
    assert engines.streams[0].closed.is_set()
    events = http.stream("/v1/completions", {"prompt": "x", "stop": ", h", "max_tokens": 50})
    assert "".join(event["choices"][0]["text"] for event in events) == "hello world"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_token_ids_are_returned_if_requested(http: Any, engines: Any) -> None:
    choice = http.complete(prompt=[5, 6], return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    events = http.stream("/v1/completions", {"prompt": [5, 6], "return_token_ids": True})
    choices = [event["choices"][0] for event in events]
    assert [token_id for part in choices for token_id in part["token_ids"]] == choice["token_ids"]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert all("prompt_token_ids" not in part for part in choices[1:])


def test_default_max_tokens_is_limited_to_context(http: Any, engines: Any) -> None:
    http.complete(prompt=[5] * 507)
    assert engines.streams[0].sampling.max_tokens == 5


def test_long_prompts_are_tokenized_off_the_event_loop(http: Any, engines: Any) -> None:
    engines.context = 100_000
    text = "hello world, " * 1000
    http.complete(prompt=text)
    expected = engines.tokenizer.encode(text, add_special_tokens=False)
    assert engines.streams[0].prompt_token_ids == expected


def test_requests_can_have_client_ids(http: Any, engines: Any) -> None:
    response = http.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"
    response = http.post("/v1/completions", {"prompt": "x", "n": 2, "request_id": "other"})
    assert response.headers["x-request-id"] == "other"
    assert [stream.request_id for stream in engines.streams] == ["mine", "other", "other-1"]


def test_first_served_name_is_the_default_model(http: Any) -> None:
    assert http.post("/v1/completions", {"prompt": "x"}).json()["model"] == "tiny"
    assert http.complete(model="also-tiny")["model"] == "also-tiny"


def test_requests_can_be_pinned_to_an_engine(http: Any, engines: Any) -> None:
    http.complete()
    response = http.post("/v1/completions", {"prompt": "x"}, headers={"X-data-parallel-rank": "3"})
    assert response.status_code == 200
    assert [stream.pinned_rank for stream in engines.streams] == [None, 3]
    response = http.post("/v1/completions", {"prompt": "x"}, headers={"X-data-parallel-rank": "-1"})
    assert response.json()["error"]["param"] == "X-data-parallel-rank"


@pytest.mark.parametrize("skip", [True, False, None])
@pytest.mark.parametrize("stream", [True, False])
def test_echoed_tokens_match_their_text_offsets(
    http: Any, engines: Any, skip: bool | None, stream: bool
) -> None:
    special = {name: engines.tokenizer.token_to_id(name) for name in ("<|user|>", "<|end|>")}
    words = engines.tokenizer.encode("the fox 🙂", add_special_tokens=False)
    prompt = [special["<|user|>"], *words, special["<|end|>"], special["<|user|>"]]
    fields = {
        "prompt": prompt, "echo": True, "logprobs": 1, "n": 2, "skip_special_tokens": skip
    }  # fmt: skip
    if stream:
        events = http.stream("/v1/completions", fields)
        choices = [event["choices"][0] for event in events]
        first = next(choice for choice in choices if choice["index"] == 0)
    else:
        first, second = http.complete(**fields)["choices"]
        assert first["logprobs"] == second["logprobs"]
    assert first["text"].startswith("<|user|>the fox 🙂<|end|><|user|>")
    shown = first["logprobs"]
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != "<|eos|>":
            assert first["text"][offset:].startswith(token)
    assert http.complete(prompt=prompt, echo=True)["choices"][0]["text"].startswith("<|user|>the")


def test_the_best_beams_are_answered_best_first(http: Any, engines: Any) -> None:
    body = http.complete(use_beam_search=True, n=2, best_of=3, max_tokens=4, logprobs=1)
    first, second = body["choices"]
    assert sum(first["logprobs"]["token_logprobs"]) >= sum(second["logprobs"]["token_logprobs"])
    assert len(first["logprobs"]["tokens"]) == 4
    assert (first["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 8)
    asked = engines.streams[-1].sampling
    assert (asked.max_tokens, asked.temperature, asked.logprobs) == (1, 0.0, 6)
    assert all(stream.closed.is_set() for stream in engines.streams)


def test_engine_failure_during_beam_search_is_an_error(http: Any, engines: Any) -> None:
    engines.script = lambda stream: [NoEngineAvailable("gone")]
    answer = http.post(
        "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "use_beam_search": True}
    )
    assert answer.status_code == 503


def test_each_token_lists_its_own_score_first(http: Any) -> None:
    scores = http.complete(echo=True, logprobs=1, max_tokens=4)["choices"][0]["logprobs"]
    for token, alternatives in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert alternatives is None or next(iter(alternatives)) == token


def test_a_missing_prompt_is_reported_in_one_sentence(http: Any) -> None:
    error = http.post("/v1/completions", {"prompt": 7}).json()["error"]
    assert error["message"] == "prompt: must be a string, or an array"
