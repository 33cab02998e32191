"""Endpoints of pooling models: results, and errors that name the parameter."""

import asyncio
import base64
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.shared.messages import PoolingParams, RequestOutput
from engine.shared.pooling import PoolingSpec, TokenPooling
from server.config import FrontEndConfig
from server.config.load import TenantConfig
from server.errors import ApiError
from server.generate.pooling import Length, PoolingModel
from server.limits import MAX_INPUT_TOKENS, MAX_PROMPTS, MAX_VECTOR_NUMBERS
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import FakeGenerationClient, Http, framed, vector_of

Pooling = Callable[..., Http]


@pytest.fixture
def text(backend: Any) -> Callable[[str], list[int]]:
    """Return a function that encodes a text to token ids, including special tokens."""
    tokenizer = ServedTokenizer(framed(backend), eos_token_ids=[0])
    return lambda text: tokenizer.encode(text, add_special_tokens=True)


def refused(http: Http, path: str, body: dict[str, Any], param: str, part: str = "") -> None:
    answer = http.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert part in error["message"]


@pytest.mark.parametrize(
    "given", ["hello", ["hello", "the fox"], [5, 6, 7], [[5, 6], [7]], ["hello"]], ids=repr
)
def test_every_input_format_is_supported(pooling_http: Pooling, text: Any, given: Any) -> None:
    http = pooling_http()
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts[0], int):
        texts = [texts]
    token_ids = [text(each) if isinstance(each, str) else each for each in texts]
    body = http.post("/v1/embeddings", {"input": given, "model": "tiny"}).json()
    tokens = sum(map(len, token_ids))
    assert body == {
        "object": "list",
        "model": "tiny",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector_of(ids)}
            for index, ids in enumerate(token_ids)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def test_large_answer_is_never_fully_in_memory(pooling_http: Pooling) -> None:
    """An answer has up to 4,194,304 numbers as text, and several clients may read slowly."""
    http, sent = pooling_http(size=4096), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            sent.append(message)
            await send(message)

        await http.app(scope, receive, noted)

    given = [[index + 1] for index in range(40)]
    answer = Http(app).post("/v1/embeddings", {"input": given})  # type: ignore[arg-type]
    data = answer.json()["data"]
    assert [each["embedding"][:3] for each in data] == [vector_of(ids, 4096)[:3] for ids in given]
    assert answer.json()["usage"]["prompt_tokens"] == len(given)
    pieces = [len(message["body"]) for message in sent if "body" in message]
    assert len(answer.content) > 2**19
    assert max(pieces) < 2**18
    assert "content-length" not in answer.headers
    assert "content-length" in http.post("/v1/embeddings", {"input": [[1]]}).headers


def test_long_text_is_not_copied_per_pair(backend: Tokenizer) -> None:
    tokenizer = ServedTokenizer(framed(backend), eos_token_ids=[0])
    maker = PoolingModel(PoolingSpec(task="embed", pooling="mean", size=1), tokenizer)
    query, documents = "the fox " * 8000, ["a"] * (MAX_PROMPTS - 1)

    async def pairs() -> None:
        await maker.of_pairs([query], documents, Length(2**16), ("query", "documents"))

    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="tokens in total"):
            asyncio.run(pairs())
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_base64_holds_float32_numbers(pooling_http: Pooling) -> None:
    body = {"input": [[5, 6], [7]], "encoding_format": "base64"}
    for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        data = pooling_http().post(path, body).json()["data"]
        found = [array("f", base64.b64decode(each[field])).tolist() for each in data]
        assert found == [vector_of([5, 6]), vector_of([7])]


def test_engines_get_the_pooling_parameters(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    http = pooling_http(dimensions=(4, 8))
    http.post("/v1/embeddings", {"input": [[1], [2]], "dimensions": 4})
    http.post("/v1/embeddings", {"input": [[3]], "dimensions": 8, "use_activation": False})
    first, second, third = engines.streams
    assert first.pooling == second.pooling == PoolingParams(dimensions=4)
    assert third.pooling == PoolingParams(activate=False)
    assert (first.group, second.group) == (0, first.id)
    assert first.closed.is_set()


def test_each_token_has_a_vector_if_requested(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    ids = [[5, 6], [7]]
    expected = [[vector_of([token_id]) for token_id in each] for each in ids]
    http = pooling_http()
    body: dict[str, Any] = {"input": ids, "task": "token_embed"}
    assert [each["data"] for each in http.post("/pooling", body).json()["data"]] == expected
    assert {stream.pooling for stream in engines.streams} == {PoolingParams(per_token=True)}
    data = http.post("/pooling", {**body, "encoding_format": "base64"}).json()["data"]
    found = [array("f", base64.b64decode(each["data"])).tolist() for each in data]
    assert found == [[number for row in rows for number in row] for rows in expected]
    classes = pooling_http(task="classify", size=3)
    data = classes.post("/pooling", {"input": ids, "task": "token_classify"}).json()["data"]
    assert [each["data"] for each in data] == [
        [vector_of([token_id], 3) for token_id in each] for each in ids
    ]
    usual = pooling_http(tokens=TokenPooling(True))
    assert [each["data"] for each in usual.post("/pooling", {"input": ids}).json()["data"]] == (
        expected
    )
    whole = usual.post("/pooling", {"input": ids, "task": "embed"}).json()["data"]
    assert [each["data"] for each in whole] == list(map(vector_of, ids))
    assert usual.post("/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"] == (
        vector_of([5, 6])
    )


def test_token_vectors_are_refused_if_unsupported(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    body: dict[str, Any] = {"input": [[5, 6]], "task": "token_embed"}
    refused(pooling_http(pooling="last"), "/pooling", body, "task", "tok_pooling_type")
    refused(pooling_http(task="classify", size=3), "/pooling", body, "model", "no embeddings")
    refused(pooling_http(), "/pooling", {**body, "task": "token_classify"}, "model", "no classes")
    large = pooling_http(size=MAX_VECTOR_NUMBERS // 4 + 1)
    refused(large, "/pooling", {**body, "input": [[1, 2], [3, 4]]}, "input", "4 vectors of")
    assert not engines.streams
    assert large.post("/pooling", {"input": [[1, 2, 3, 4]] * 2}).status_code == 200


def test_embeddings_are_truncated_automatically_if_configured(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    http = pooling_http(dimensions=(2, 4), usual_dimensions=4)
    for path, body, wanted in (
        ("/v1/embeddings", {"input": [1]}, 4),
        ("/v1/embeddings", {"input": [1], "dimensions": 2}, 2),
        ("/v1/embeddings", {"input": [1], "dimensions": 8}, 0),
        ("/pooling", {"input": [1]}, 4),
        ("/score", {"text_1": "a", "text_2": "b"}, 4),
    ):
        http.post(path, body)
        assert engines.streams[-1].pooling == PoolingParams(dimensions=wanted)


def test_only_trained_dimensions_are_accepted(pooling_http: Pooling) -> None:
    def ask(size: int) -> dict[str, Any]:
        return {"input": [1], "dimensions": size}

    refused(pooling_http(), "/v1/embeddings", ask(4), "dimensions", "cannot be shortened")
    refused(
        pooling_http(dimensions=(4,)), "/v1/embeddings", ask(5), "dimensions", "have 4 dimensions"
    )
    refused(pooling_http(dimensions=()), "/v1/embeddings", ask(9), "dimensions", "1 to 8")
    assert pooling_http(dimensions=()).post("/v1/embeddings", ask(3)).status_code == 200


def test_long_inputs_are_refused_or_truncated(
    pooling_http: Pooling, engines: FakeGenerationClient, text: Any
) -> None:
    engines.context = 16
    http = pooling_http()
    long = "quick brown fox jumps over the lazy dog " * 5
    for given in (long, [[5] * 17], long * 500):
        refused(http, "/v1/embeddings", {"input": given}, "input", "at most 16 tokens")
    body: dict[str, Any] = {"input": ["a", long]}
    refused(http, "/v1/embeddings", body, "input", "input[1]: this model takes")
    whole = text(long)
    cases: dict[str, tuple[dict[str, Any], list[int]]] = {
        "whole": ({"truncate_prompt_tokens": -1}, [*whole[:15], whole[-1]]),
        "five": ({"truncate_prompt_tokens": 5}, [*whole[:4], whole[-1]]),
        "end": (
            {"truncate_prompt_tokens": 5, "truncation_side": "left"},
            [whole[0], *whole[-4:]],
        ),
    }
    for fields, expected in cases.values():
        for given in (long, long * 500):
            engines.streams.clear()
            assert http.post("/v1/embeddings", {"input": given, **fields}).status_code == 200
            if given == long or fields.get("truncation_side") != "left":
                assert engines.streams[0].prompt_token_ids == expected
    engines.streams.clear()
    http.post("/v1/embeddings", {"input": [list(range(9))], "truncate_prompt_tokens": 3})
    assert engines.streams[0].prompt_token_ids == [0, 1, 2]
    for wrong in (0, 17, -2):
        body = {"input": "a", "truncate_prompt_tokens": wrong}
        refused(http, "/v1/embeddings", body, "truncate_prompt_tokens")
    body = {"input": "a", "truncate_prompt_tokens": 2}
    refused(http, "/v1/embeddings", body, "truncate_prompt_tokens", "the 2 tokens")


def test_prompts_are_prepended_to_texts(
    pooling_http: Pooling, engines: FakeGenerationClient, text: Any
) -> None:
    http = pooling_http(prompts={"query": "q: ", "document": "d: "}, default_prompt="document")
    http.post("/v1/embeddings", {"input": "fox"})
    http.post("/v1/embeddings", {"input": "fox", "prompt_name": "query"})
    http.post("/v1/embeddings", {"input": [7]})
    http.post("/score", {"text_1": "fox", "text_2": "dog"})
    found = [each.prompt_token_ids for each in engines.streams]
    assert found == [
        text("d: fox"),
        text("q: fox"),
        [7],
        text("q: fox"),
        text("d: dog"),
    ]
    body = {"input": "fox", "prompt_name": "other"}
    refused(http, "/v1/embeddings", body, "prompt_name", "query, document")


def _cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return float(dot / (sum(x * x for x in a) * sum(x * x for x in b)) ** 0.5)


def test_pairs_are_scored_by_cosine_similarity(pooling_http: Pooling, text: Any) -> None:
    http = pooling_http()
    texts = ["fox", "the lazy dog", "hello"]
    one = http.post("/score", {"queries": "fox", "documents": texts}).json()
    expected = [_cosine(vector_of(text("fox")), vector_of(text(each))) for each in texts]
    assert [each["score"] for each in one["data"]] == pytest.approx(expected)
    assert one["data"][0]["score"] == pytest.approx(1.0)
    assert http.post("/score", {"queries": "fox", "items": texts}).json()["data"] == one["data"]
    many = http.post("/v1/score", {"text_1": texts, "text_2": texts}).json()
    assert [each["score"] for each in many["data"]] == pytest.approx([1.0] * 3)
    assert [each["index"] for each in many["data"]] == [0, 1, 2]
    refused(http, "/score", {"text_1": ["a", "b"], "text_2": texts}, "text_1", "cannot be paired")
    refused(http, "/score", {"text_1": "a"}, "documents", "exactly one")
    body = {"text_1": "a", "queries": "b", "text_2": "c"}
    refused(http, "/score", body, "queries", "exactly one of queries, text_1, data_1")


def test_pairs_are_scored_by_trained_similarity(pooling_http: Pooling, text: Any) -> None:
    a, b = vector_of(text("fox")), vector_of(text("hello"))
    pairs = list(zip(a, b, strict=True))
    expected = {
        "dot": sum(x * y for x, y in pairs),
        "euclidean": -(sum((x - y) ** 2 for x, y in pairs) ** 0.5),
        "manhattan": -sum(abs(x - y) for x, y in pairs),
    }
    body = {"queries": "fox", "documents": "hello"}
    for name, value in expected.items():
        answer = pooling_http(similarity=name).post("/score", body).json()
        assert answer["data"][0]["score"] == pytest.approx(value), name


def test_a_cross_encoder_sees_both_texts_of_a_pair(
    pooling_http: Pooling, engines: FakeGenerationClient, text: Any
) -> None:
    http = pooling_http(task="classify", size=1)
    answer = http.post("/rerank", {"query": "fox", "documents": ["hello", "the lazy dog"]}).json()
    query, first, second = text("fox"), text("hello"), text("the lazy dog")
    pairs = [query + first[1:], query + second[1:]]
    assert [each.prompt_token_ids for each in engines.streams] == pairs
    assert {each.pooling.types_from for each in engines.streams if each.pooling} == {len(query)}
    scores = [float(len(pair)) for pair in pairs]
    assert scores[0] < scores[1]
    assert answer["results"] == [
        {"index": 1, "relevance_score": scores[1], "document": {"text": "the lazy dog"}},
        {"index": 0, "relevance_score": scores[0], "document": {"text": "hello"}},
    ]
    assert answer["usage"]["total_tokens"] == sum(map(len, pairs))


def test_longer_text_of_a_pair_is_truncated_first(
    pooling_http: Pooling, engines: FakeGenerationClient, text: Any
) -> None:
    engines.context = 12
    http = pooling_http(task="classify", size=1)
    long = "the lazy dog jumps over the quick brown fox"
    body = {"query": "fox", "documents": [long]}
    refused(http, "/rerank", body, "documents", "at most 12 tokens")
    assert http.post("/rerank", {**body, "truncate_prompt_tokens": -1}).status_code == 200
    query, document = text("fox"), text(long)
    pair = engines.streams[-1].prompt_token_ids
    assert len(pair) == 12
    assert pair == [*query, *document[1 : 12 - len(query)], document[-1]]
    http.post("/rerank", {"query": long, "documents": [long], "truncate_prompt_tokens": -1})
    pair = engines.streams[-1].prompt_token_ids
    assert pair == [*document[:6], document[-1], *document[1:5], document[-1]]
    http.post("/rerank", {**body, "max_tokens_per_doc": 2})
    assert engines.streams[-1].prompt_token_ids == [*query, *document[1:3], document[-1]]
    assert http.post("/v2/rerank", body).status_code == 200, "Cohere's API cuts by itself"


def test_rerank_results_have_jina_and_cohere_formats(pooling_http: Pooling) -> None:
    http = pooling_http()
    body = {"query": "fox", "documents": ["hello", {"text": "fox"}, "dog"], "top_n": 2}
    jina = http.post("/v1/rerank", body).json()
    assert jina["results"][0]["index"] == 1
    assert len(jina["results"]) == 2
    assert jina["results"][0]["document"] == {"text": "fox"}
    assert "meta" not in jina
    cohere = http.post("/v2/rerank", body).json()
    assert "document" not in cohere["results"][0]
    assert cohere["meta"]["billed_units"] == {"search_units": 1}
    shown = http.post("/v2/rerank", {**body, "return_documents": True, "top_n": 0}).json()
    assert len(shown["results"]) == 3
    assert shown["results"][0]["document"] == {"text": "fox"}


def test_inputs_are_classified(pooling_http: Pooling) -> None:
    http = pooling_http(task="classify", size=3, labels=("bad", "good", "fine"))
    body = http.post("/classify", {"input": [[9, 1], [2, 7, 5]]}).json()
    assert body["data"] == [
        {"index": 0, "label": "good", "probs": [2.0, 9.0, 1.0], "num_classes": 3},
        {"index": 1, "label": "fine", "probs": [3.0, 2.0, 7.0], "num_classes": 3},
    ]
    pooled = http.post("/pooling", {"input": [9, 1], "task": "classify"}).json()
    assert pooled["data"] == [{"object": "pooling", "index": 0, "data": [2.0, 9.0, 1.0]}]


def test_model_list_reports_task(pooling_http: Pooling, http: Http) -> None:
    embeds, classes = pooling_http(), pooling_http(task="classify", size=3)
    inputs: dict[str, Any] = {"input": "hello"}
    pair = {"text_1": "a", "text_2": "b"}
    refused(embeds, "/classify", inputs, "model", "'tiny' has no classes; it serves /v1/embeddings")
    refused(embeds, "/pooling", {**inputs, "task": "classify"}, "model", "has no classes")
    refused(classes, "/v1/embeddings", inputs, "model", "makes no embeddings; it serves /classify")
    refused(classes, "/score", pair, "model", "has 3 classes, which rank nothing")
    refused(classes, "/pooling", {**inputs, "dimensions": 2}, "dimensions")
    message = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": message},
        "/v1/responses": inputs,
    }
    for path, body in bodies.items():
        refused(embeds, path, body, "model", "generates no text; it serves /v1/embeddings")
    answer = embeds.post("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": message})
    assert answer.status_code == 400
    assert "generates no text" in answer.json()["error"]["message"]
    rank = {"query": "a", "documents": ["b"]}
    for path, body in {
        "/v1/embeddings": inputs,
        "/pooling": inputs,
        "/classify": inputs,
        "/score": pair,
        "/v1/score": pair,
        "/rerank": rank,
        "/v1/rerank": rank,
        "/v2/rerank": rank,
    }.items():
        refused(http, path, body, "model", "generates text and makes no embeddings or scores")
        assert http.post(path, {**body, "model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": 5}, "input"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": [[1], ["a"]]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": [10**30]}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_PROMPTS + 1)}, "input"),
        ("/v1/embeddings", {"input": [[1]] * (MAX_PROMPTS + 1)}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * MAX_PROMPTS}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"] * (MAX_PROMPTS + 1)}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 10**30}, "top_n"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_by_name(
    pooling_http: Pooling, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = pooling_http().post(path, fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].partition("[")[0].partition(".")[0] == param


def test_size_of_answers_is_limited(pooling_http: Pooling, engines: FakeGenerationClient) -> None:
    http = pooling_http(size=MAX_VECTOR_NUMBERS // 4 + 1)
    refused(http, "/v1/embeddings", {"input": [[1]] * 4}, "input", "more than the")
    refused(http, "/score", {"text_1": "a", "text_2": ["b"] * 3}, "text_2", "too many")
    engines.context = MAX_INPUT_TOKENS
    body = {"input": ["a b " * (MAX_INPUT_TOKENS // 4)] * 4}
    refused(pooling_http(), "/v1/embeddings", body, "input", "send several requests")
    assert not engines.streams


def test_concurrency_limit_of_key_applies(
    pooling_http: Pooling, config: FrontEndConfig, engines: FakeGenerationClient
) -> None:
    from msgspec.structs import replace

    few = replace(config, tenants=TenantConfig(max_sequences_per_key=2))
    http = pooling_http(few)
    refused(http, "/v1/embeddings", {"input": [[1]] * 3}, "input", "input: 3 sequences")
    assert http.post("/v1/embeddings", {"input": [[1]] * 2}).status_code == 200


def test_errors_of_engines_about_an_input_are_returned(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    http = pooling_http()
    engines.script = lambda stream: [
        RequestOutput(stream.id, [], "error", error="it cannot be", refused=True)
    ]
    answer = http.post("/v1/embeddings", {"input": [[1], [2]]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "it cannot be")
    engines.script = lambda stream: [RequestOutput(stream.id, [], "error", error="lost")]
    assert http.post("/v1/embeddings", {"input": [[1], [2]]}).status_code == 500
    assert all(stream.closed.is_set() for stream in engines.streams)
    engines.ready = False
    assert http.post("/v1/embeddings", {"input": [[1]]}).status_code == 503


def test_large_request_is_submitted_in_windows(
    pooling_http: Pooling, engines: FakeGenerationClient
) -> None:
    token_ids = [[index % 300] * (1 + index % 5) for index in range(1000)]
    data = pooling_http().post("/v1/embeddings", {"input": token_ids}).json()["data"]
    assert [each["embedding"] for each in data] == [vector_of(ids) for ids in token_ids]


def test_vectors_are_counted(pooling_http: Pooling) -> None:
    http = pooling_http()
    http.post("/v1/embeddings", {"input": [[1, 2], [3]]})
    lines = http.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("swell_prompt_tokens_total")]
    assert [float(line.split()[-1]) for line in counted] == [3.0]


def test_invocations_are_answered_like_the_matching_endpoint(pooling_http: Pooling) -> None:
    embeds = pooling_http()
    found = embeds.post("/invocations", {"input": [[1, 2]]}).json()
    assert found["data"][0]["embedding"] == vector_of([1, 2])
    ranked = embeds.post("/invocations", {"query": "a", "documents": ["b", "c"]}).json()
    assert len(ranked["results"]) == 2
    scored = embeds.post("/invocations", {"text_1": "a", "text_2": ["b", "c"]}).json()
    assert len(scored["data"]) == 2
    refused(embeds, "/invocations", {"prompt": "a"}, "queries", "exactly one of")
    classes = pooling_http(task="classify", size=3)
    assert classes.post("/invocations", {"input": "a"}).json()["data"][0]["num_classes"] == 3
