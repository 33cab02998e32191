"""POST /v1/embeddings, /pooling, /classify, /score and /rerank: vectors and scores of inputs."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import dist, sqrt
from operator import mul
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Response

from engine.shared.pooling import Similarity, Task, TokenTask
from server.api.generation import unsuitable
from server.api.openapi import QUEUED, json_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors import schema
from server.api.vectors.pooled_call import (
    PooledCall,
    inputs_of,
    items_shown,
    numbers,
    parts,
    rows,
    shown,
)
from server.errors import invalid, invalid_field
from server.generate.pooling import Length, PoolingModel
from server.http.call import Call
from server.limits import MAX_PROMPTS, MAX_VECTOR_NUMBERS

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/embeddings", responses=json_responses(schema.EmbeddingsResponse) | QUEUED)
async def create_embeddings(
    body: schema.EmbeddingsRequest, call: Call, services: ServicesDep
) -> Response:
    """Compute an embedding of each input."""
    called = PooledCall(call, services, body)
    called.wants("embed")
    model = called.model
    dimensions = _dimensions(body.dimensions, model)
    inputs = await inputs_of(called, body, _prompt(body.prompt_name, model))
    _check_answer(len(inputs), dimensions or model.spec.size)
    vectors = await called.vectors(inputs, dimensions=dimensions)

    def show(index: int, vector: bytes) -> schema.Embedding:
        return schema.Embedding(index, shown(vector, body.encoding_format))

    payload = schema.EmbeddingsResponse(called.name, [], called.usage)
    return called.response(payload, "data", items_shown(vectors, show))


@router.post("/pooling", responses=json_responses(schema.PoolingResponse) | QUEUED)
async def pool(body: schema.PoolingRequest, call: Call, services: ServicesDep) -> Response:
    """Compute a vector for each input, or for each of its tokens, depending on the model."""
    called = PooledCall(call, services, body)
    model = called.model
    per_token = _is_per_token(body.task, called)
    dimensions = 0
    if model.spec.task == "embed":
        dimensions = _dimensions(body.dimensions, model)
    elif body.dimensions is not None:
        raise invalid_field("dimensions", "this model computes class scores, not embeddings")
    inputs = await inputs_of(called, body, _prompt(body.prompt_name, model))
    size = dimensions or model.spec.size
    count = sum([len(each.token_ids) for each in inputs]) if per_token else len(inputs)
    _check_answer(count, size)
    vectors = await called.vectors(inputs, dimensions=dimensions, per_token=per_token)

    def show(index: int, vector: bytes) -> schema.PooledData:
        return schema.PooledData(index, cast("Any", shown(vector, body.encoding_format)))

    shown_vectors: Iterable[Iterable[bytes]] = items_shown(vectors, show)
    if per_token and body.encoding_format != "base64":
        shown_vectors = (
            parts(schema.PooledData(index, []), "data", rows(of_tokens, size))
            for index, of_tokens in enumerate(vectors)
        )
    payload = schema.PoolingResponse(
        f"pool-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", shown_vectors)


@router.post("/classify", responses=json_responses(schema.ClassifyResponse) | QUEUED)
async def classify(body: schema.ClassifyRequest, call: Call, services: ServicesDep) -> Response:
    """Classify each input."""
    called = PooledCall(call, services, body)
    called.wants("classify")
    labels = called.model.spec.labels
    inputs = await inputs_of(called, body)
    _check_answer(len(inputs), len(labels))
    vectors = await called.vectors(inputs)

    def show(index: int, vector: bytes) -> schema.Classified:
        scores = numbers(vector)
        best = max(range(len(scores)), key=scores.__getitem__)
        return schema.Classified(index, labels[best], scores, len(scores))

    payload = schema.ClassifyResponse(
        f"classify-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", items_shown(vectors, show))


def _is_per_token(task: Task | TokenTask | None, called: PooledCall) -> bool:
    spec = called.model.spec
    if task is None:
        return spec.tokens is not None and spec.tokens.is_usual
    called.wants(task.removeprefix("token_"))
    per_token = task.startswith("token_")
    if per_token and not spec.in_one_step:
        raise invalid_field(
            "task",
            "this model's prompts are computed in parts, so tokens have no vectors; "
            'serve it with --pooler-config \'{"tok_pooling_type": "ALL"}\'',
        )
    return per_token


def _dimensions(requested: int | None, model: PoolingModel) -> int:
    """Return the requested number of embedding dimensions; 0 for all."""
    size, allowed = model.spec.size, model.spec.dimensions
    if requested is None:
        return model.spec.usual_dimensions
    if requested == size:
        return 0
    if allowed is None:
        raise invalid_field(
            "dimensions",
            f"this model's embeddings have {size} dimensions and cannot be shortened",
        )
    if requested > size or (allowed and requested not in allowed):
        which = ", ".join(map(str, allowed)) if allowed else f"1 to {size}"
        raise invalid_field("dimensions", f"this model's embeddings can have {which} dimensions")
    return requested


def _prompt(name: str | None, model: PoolingModel) -> str:
    try:
        return model.prompt(name)
    except KeyError:
        known = ", ".join(model.spec.prompts) or "none"
        raise invalid_field(
            "prompt_name", f"the model defines no prompt of that name, only: {known}"
        ) from None


def _check_answer(count: int, size: int) -> None:
    if count * size > MAX_VECTOR_NUMBERS:
        raise invalid_field(
            "input",
            f"{count} vectors of {size} numbers are more than the {MAX_VECTOR_NUMBERS} "
            "numbers that an answer may have; send several requests",
        )


_COHERE_PATH = "/v2/rerank"
_COHERE_TOKENS = 4096
"""Default maximum document length in tokens in Cohere's API."""
_NUMBERS_AT_ONCE = 1 << 16


_SCORED = json_responses(schema.ScoreResponse) | QUEUED
_RANKED = json_responses(schema.RerankResponse) | QUEUED


@router.post("/v1/score", responses=_SCORED)
@router.post("/score", responses=_SCORED)
async def score(body: schema.ScoreRequest, call: Call, services: ServicesDep) -> Response:
    """Score pairs of texts."""
    called = PooledCall(call, services, body)
    first, firsts = _given(body, ("queries", "text_1", "data_1"))
    second, seconds = _given(body, ("documents", "items", "text_2", "data_2"))
    if len(firsts) not in (1, len(seconds)):
        raise invalid_field(
            first,
            f"{len(firsts)} texts cannot be paired with {len(seconds)}; send one, or the "
            "same number",
        )
    scores = await _scores(called, firsts, seconds, (first, second))
    payload = schema.ScoreResponse(
        f"score-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", items_shown(scores, schema.Score))


@router.post(_COHERE_PATH, responses=_RANKED)
@router.post("/v1/rerank", responses=_RANKED)
@router.post("/rerank", responses=_RANKED)
async def rerank(body: schema.RerankRequest, call: Call, services: ServicesDep) -> Response:
    """Sort documents by relevance to a query."""
    called = PooledCall(call, services, body)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    cohere = call.path.endswith(_COHERE_PATH)
    max_doc_tokens = body.max_tokens_per_doc or (_COHERE_TOKENS if cohere else None)
    scores = await _scores(called, [body.query], texts, ("query", "documents"), max_doc_tokens)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    shows = not cohere if body.return_documents is None else body.return_documents

    def show(_: int, index: int) -> schema.RerankResult:
        document = schema.DocumentText(texts[index]) if shows else msgspec.UNSET
        return schema.RerankResult(index, scores[index], document)

    meta = schema.RerankMeta(schema.ApiVersion(), schema.BilledUnits()) if cohere else msgspec.UNSET
    payload = schema.RerankResponse(
        f"rerank-{called.request_id}", called.name, called.usage, [], meta
    )
    return called.response(payload, "results", items_shown(order[: body.top_n or None], show))


def _given(body: schema.ScoreRequest, names: tuple[str, ...]) -> tuple[str, Sequence[str]]:
    """Return the name and the texts of the one field among `names` that is set."""
    found = [name for name in names if getattr(body, name) is not None]
    if len(found) != 1:
        raise invalid(f"{names[0]}: exactly one of {', '.join(names)} must be given", names[0])
    texts = getattr(body, found[0])
    return found[0], [texts] if isinstance(texts, str) else texts


async def _scores(
    called: PooledCall,
    firsts: Sequence[str],
    seconds: Sequence[str],
    fields: tuple[str, str],
    max_second_tokens: int | None = None,
) -> list[float]:
    """Return the score of each pair: by a cross-encoder, or cosine similarity of embeddings."""
    spec = called.model.spec
    if spec.task == "classify":
        if spec.size != 1:
            lacks = f"has {spec.size} classes, which rank nothing"
            raise unsuitable(called.name, lacks, called.model)
        called.admit(len(seconds), fields[1])
        inputs = await called.model.of_pairs(
            firsts, seconds, _cutting(called.length, max_second_tokens), fields, max_second_tokens
        )
        return [numbers(vector)[0] for vector in await called.vectors(inputs)]
    total = len(firsts) + len(seconds)
    if total > MAX_PROMPTS or total * spec.size > MAX_VECTOR_NUMBERS:
        raise invalid(f"{fields[1]}: {len(seconds)} texts are too many for one request", fields[1])
    called.admit(total, fields[1])
    model, length = called.model, called.length
    query = [model.prompt(None, "query") + text for text in firsts]
    texts = [model.prompt(None, "document", "passage") + text for text in seconds]
    inputs = await model.of_texts(query, length, fields[0])
    if max_second_tokens is not None:
        length = _cutting(length, max_second_tokens)
        length = msgspec.structs.replace(length, keep=min(length.keep or 0, max_second_tokens))
    inputs += await model.of_texts(texts, length, fields[1])
    vectors = await called.vectors(inputs, dimensions=spec.usual_dimensions)
    left, right = vectors[: len(firsts)], vectors[len(firsts) :]
    compare = _SIMILARITIES[spec.similarity]
    found, done = [], 0
    for one, other in zip(left * len(right) if len(left) == 1 else left, right, strict=True):
        a, b = array("f", one), array("f", other)
        found.append(compare(a, b))
        done += len(a)
        if done > _NUMBERS_AT_ONCE:  # yield to the event loop
            done = 0
            await asyncio.sleep(0)
    return found


def _cutting(length: Length, max_second_tokens: int | None) -> Length:
    """Return the length limits with truncation of documents enabled."""
    if max_second_tokens is None or length.keep is not None:
        return length
    return msgspec.structs.replace(length, keep=length.max_tokens)


Compare = Callable[[Sequence[float], Sequence[float]], float]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(mul, a, b)))


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    scale = sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / scale if scale else 0.0


_SIMILARITIES: dict[Similarity, Compare] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": lambda a, b: -dist(a, b),
    "manhattan": lambda a, b: -sum(abs(x - y) for x, y in zip(a, b, strict=True)),
}
"""Computed as in sentence-transformers."""
