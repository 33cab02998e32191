"""Requests that are small alone but excessive together, and overlong prompts."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer

from engine.shared.messages import RequestOutput
from server.access.admission import Reservation
from server.api.completions.schema import CompletionRequest
from server.generate.budget import room_for_output
from server.generate.request import GenerationRequest
from server.limits import (
    MAX_ANSWER_TOKENS,
    MAX_BEAM_TOKENS,
    MAX_NAMED_TOKENS,
    MAX_SCORES,
    MAX_UNREAD,
)
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import ServedTokenizer
from tests.support.cpu_time import takes_less_than
from tests.support.waiting import PATIENCE


class Counting(ServedTokenizer):
    """Records the amount of text it receives, and whether it blocked the event loop."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__(backend)
        self.sizes: list[int] = []
        self.on_loop = 0

    def encode_many(self, texts: Any, *, add_special_tokens: bool) -> list[list[int]]:
        self._note(sum(map(len, texts)))
        return super().encode_many(texts, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._note(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)

    def _note(self, size: int) -> None:
        self.sizes.append(size)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self.on_loop = max(self.on_loop, size)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("bad_words", {"bad_words": ["x" * 4_000_000]}),
        ("bad_words", {"bad_words": [f"w{i} x" for i in range(1024)], "n": 127}),
        ("stop", {"stop": ["x" * 1000]}),
        ("stop", {"stop": "x" * 1000}),
        ("stop", {"stop": [f"{i}." for i in range(100)], "n": 82}),
        ("stop_token_ids", {"stop_token_ids": [i % 256 for i in range(100_000)], "n": 2}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * (MAX_NAMED_TOKENS + 1)}),
        ("logit_bias", {"logit_bias": {str(i): 1.0 for i in range(5000)}, "n": 128}),
        ("logprobs", {"logprobs": 5, "n": 128, "max_tokens": 400}),
        ("prompt_logprobs", {"prompt": [7] * 400, "prompt_logprobs": 5, "n": 128}),
        ("logprobs", {"prompt": [7] * 400, "echo": True, "logprobs": 5, "n": 128}),
        ("max_tokens", {"prompt": [[7]] * 2048, "max_tokens": 510 + 3}),
        ("max_tokens", {"prompt": [[7] * 100] * 128, "n": 16, "max_tokens": 500, "echo": True}),
        ("prompt", {"prompt": ["hello"] * 100, "n": 21}),
        ("best_of", {"best_of": 129}),
        ("n", {"use_beam_search": True, "n": 32, "prompt": [[7] * 600] * 4}),
        ("n", {"use_beam_search": True, "n": 32, "prompt": ["hello"] * 8, "max_tokens": 512}),
        ("n", {"use_beam_search": True, "n": 32, "prompt": ["hello"] * 64}),
        ("stop_token_ids", {"use_beam_search": True, "n": 32, "stop_token_ids": [*range(40)]}),
    ],
)
def test_total_cost_of_fields_is_limited(
    http: Any, engines: Any, field: str, fields: dict[str, Any]
) -> None:
    engines.context = 1024

    def refuse() -> None:
        response = http.post("/v1/completions", {"prompt": "hello", **fields})
        assert response.status_code == 400, response.text[:200]
        assert response.json()["error"]["param"].split("[")[0].split(".")[0] == field
        assert not engines.streams
        assert len(response.content) < 1000

    takes_less_than(1.0, refuse)


def test_default_max_tokens_is_limited_by_budget(http: Any, engines: Any) -> None:
    engines.context = 2**17
    http.chat(n=1, logprobs=True, top_logprobs=5)
    assert engines.streams[-1].sampling.max_tokens == MAX_SCORES // 6
    http.chat(n=16)
    assert engines.streams[-1].sampling.max_tokens == MAX_ANSWER_TOKENS // 16
    http.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}],
        "logprobs": True, "top_logprobs": 5})  # fmt: skip
    assert engines.streams[-1].sampling.max_tokens > 2**17 - 20, "scores of a stream are not kept"


def test_default_length_of_search_is_limited_by_resend_budget() -> None:
    fields = CompletionRequest.model_validate({"prompt": "hello", "use_beam_search": True})
    request = GenerationRequest(fields=fields, texts=["hello"], best_of=32, max_model_len=2**20)
    assert room_for_output(request, 1000) == MAX_BEAM_TOKENS // 32 - 1000


def test_resent_tokens_of_search_count_against_queue(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(Reservation, "recount", lambda _, tokens, now: counted.append(tokens))
    for fields in ({}, {"use_beam_search": True}):
        http.complete(prompt=[5, 6, 7], n=2, max_tokens=4, **fields)
    assert counted == [2 * 3, 2 * (3 + 4)]


def test_oversized_requests_are_refused_before_tokenization(
    http: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ServedTokenizer, "encode", encode)
    monkeypatch.setattr(ServedTokenizer, "encode_many", encode)
    body = {"prompt": ["hello"] * 16, "n": 128, "logprobs": 5, "max_tokens": 200}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"


def test_duplicate_stop_token_ids_are_merged(http: Any, engines: Any) -> None:
    http.complete(stop_token_ids=[9, 4] * 1000)
    assert engines.streams[0].sampling.stop_token_ids == (4, 9)


@pytest.mark.parametrize("keep", [None, 5000])
def test_text_beyond_any_context_is_not_tokenized(backend: Tokenizer, keep: int | None) -> None:
    tokenizer = Counting(backend)
    text = "the quick brown fox jumps over the lazy dog " * 20_000

    async def encode() -> tuple[list[int], bool]:
        return await encode_prompt(
            tokenizer, text, add_special_tokens=True, longest=8000, keep=keep
        )

    if keep is None:
        with pytest.raises(TextTooLong):
            asyncio.run(encode())
    else:
        whole = tokenizer.backend.encode(text).ids
        assert asyncio.run(encode()) == (whole[-keep:], False)
    assert sum(tokenizer.sizes) <= 2**17
    assert tokenizer.on_loop == 0


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, 100_000, 400_000, 2_000_000])
def test_long_text_tokenized_in_parts_has_same_tokens(backend: Tokenizer, keep: int | None) -> None:
    tokenizer = Counting(backend)
    words = ["the quick ", "brown\n", "  fox", "naïve café ", "你好 ", "aaaaaaaa"]
    text = "".join([words[i * i % 7 % 6] for i in range(120_000)])
    whole = tokenizer.backend.encode(text).ids
    found = asyncio.run(
        encode_prompt(tokenizer, text, add_special_tokens=True, longest=10**6, keep=keep)
    )
    cut = keep is not None and keep < len(whole)
    assert found == (whole[-keep:] if cut and keep else whole, not cut)


def test_many_short_prompts_are_tokenized_off_the_event_loop(backend: Tokenizer) -> None:
    tokenizer = Counting(backend)
    texts = [f"hello there, number {i} " * (i % 40) for i in range(2048)]
    found = asyncio.run(tokenizer.encode_many_async(texts, add_special_tokens=True))
    assert found == [backend.encode(text).ids for text in texts]
    assert tokenizer.on_loop <= 4000
    assert max(tokenizer.sizes) < 2**18


def test_a_too_long_prompt_is_refused_with_the_reason(http: Any, engines: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "hello " * 100_000}),
        ("/v1/completions", {"prompt": ["hello", "hello " * 100_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 100_000}]}),
    ):
        response = http.post(path, body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in ("prompt", "messages")
    kept = http.complete(prompt="hello " * 100_000, truncate_prompt_tokens=5, return_token_ids=True)
    assert len(kept["choices"][0]["prompt_token_ids"]) == 5


def test_large_answer_equals_small_answers(http: Any, engines: Any) -> None:
    engines.context = 4096
    words = engines.tokenizer.encode("hello world ", add_special_tokens=False)
    engines.script = engines.tokens(words * 400, cut=lambda left: 50)
    fields = {"logprobs": 2, "max_tokens": 1000, "prompt_logprobs": 2, "n": 2}
    large = http.complete(prompt=[5, 6, 7], **fields)["choices"]
    small = http.complete(prompt=[5, 6, 7], **{**fields, "max_tokens": 10})["choices"]
    for whole, part in zip(large, small, strict=True):
        assert len(whole["logprobs"]["tokens"]) == 1000
        assert whole["text"].startswith(part["text"])
        assert whole["prompt_logprobs"] == part["prompt_logprobs"]
        for name, values in part["logprobs"].items():
            assert whole["logprobs"][name][:10] == values
    chat = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole, part = (http.chat(max_tokens=count, **chat)["choices"][0] for count in (1000, 10))
    assert whole["logprobs"]["content"][:10] == part["logprobs"]["content"]
    assert whole["token_ids"][:10] == part["token_ids"]


async def test_memory_of_slow_reader_is_bounded_over_its_sequences(
    app: FastAPI, engines: Any
) -> None:
    """The memory of a request is bounded over all its sequences together."""
    given = [0]
    producers: list[asyncio.Task[None]] = []

    def script(stream: Any) -> list[RequestOutput]:
        async def produce() -> None:
            while not stream.closed.is_set():
                stream.feed(RequestOutput(1, [7] * 100))
                given[0] += 100
                await asyncio.sleep(0)

        producers.append(asyncio.create_task(produce()))
        return []

    engines.context = 512

    engines.script = script
    body = b'{"prompt":"hello","n":128,"stream":true,"max_tokens":400}'

    async def receive() -> dict[str, Any]:
        if not engines.streams:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message.get("more_body"):
            await asyncio.gather(*[stream.closed.wait() for stream in engines.streams])

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"",
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "scheme": "http", "http_version": "1.1", "server": ("swell", 1),
        "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    async with asyncio.timeout(PATIENCE):
        await app(scope, receive, send)  # type: ignore[arg-type]
    assert given[0] < 2 * MAX_UNREAD


def test_tokenize_refuses_too_long_text(http: Any) -> None:
    text = "hello " * 400_000
    for body, field in (
        ({"prompt": text}, "prompt"),
        ({"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        response = http.post("/tokenize", body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
    assert http.post("/tokenize", {"prompt": text[:90_000]}).json()["count"] > 10_000
