"""POST /score and POST /rerank, the latter in the shapes of Jina and Cohere."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from math import dist, sqrt
from operator import mul

import msgspec
from fastapi import APIRouter, Response

from engine.shared.pooling import Similarity
from server.api.generation import unsuitable
from server.api.openapi import MODEL_ERRORS, json_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors.pooled_call import PooledCall, items_shown, numbers
from server.api.vectors.schema import (
    ApiVersion,
    BilledUnits,
    DocumentText,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from server.errors import invalid, invalid_field
from server.generate.pooling.inputs import Length
from server.http.call import Call
from server.limits import MAX_PROMPTS, MAX_VECTOR_NUMBERS

_COHERE_PATH = "/v2/rerank"
_COHERE_TOKENS = 4096
"""Tokens that Cohere's API cuts documents to by itself."""
_NUMBERS_AT_ONCE = 1 << 16


_SCORED = json_responses(ScoreResponse, *MODEL_ERRORS)
_RANKED = json_responses(RerankResponse, *MODEL_ERRORS)

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/score", responses=_SCORED)
@router.post("/score", responses=_SCORED)
async def score(body: ScoreRequest, call: Call, services: ServicesDep) -> Response:
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
    payload = ScoreResponse(
        f"score-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", items_shown(scores, Score))


@router.post(_COHERE_PATH, responses=_RANKED)
@router.post("/v1/rerank", responses=_RANKED)
@router.post("/rerank", responses=_RANKED)
async def rerank(body: RerankRequest, call: Call, services: ServicesDep) -> Response:
    """Put documents in the order in which they fit a query."""
    called = PooledCall(call, services, body)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    cohere = call.path.endswith(_COHERE_PATH)
    max_doc_tokens = body.max_tokens_per_doc or (_COHERE_TOKENS if cohere else None)
    scores = await _scores(called, [body.query], texts, ("query", "documents"), max_doc_tokens)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    shows = not cohere if body.return_documents is None else body.return_documents

    def show(_: int, index: int) -> RerankResult:
        document = DocumentText(texts[index]) if shows else msgspec.UNSET
        return RerankResult(index, scores[index], document)

    meta = RerankMeta(ApiVersion(), BilledUnits()) if cohere else msgspec.UNSET
    payload = RerankResponse(f"rerank-{called.request_id}", called.name, called.usage, [], meta)
    return called.response(payload, "results", items_shown(order[: body.top_n or None], show))


def _given(body: ScoreRequest, names: tuple[str, ...]) -> tuple[str, Sequence[str]]:
    """Return the texts of the one field of several that is given, and its name."""
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
    most_of_second: int | None = None,
) -> list[float]:
    """Return how well each pair fits, by a cross-encoder or by the angle between embeddings."""
    spec = called.model.spec
    if spec.task == "classify":
        if spec.size != 1:
            lacks = f"has {spec.size} classes, which rank nothing"
            raise unsuitable(called.name, lacks, called.model)
        called.admit(len(seconds), fields[1])
        inputs = await called.model.inputs.of_pairs(
            firsts, seconds, _cutting(called.length, most_of_second), fields, most_of_second
        )
        return [numbers(vector)[0] for vector in await called.vectors(inputs)]
    total = len(firsts) + len(seconds)
    if total > MAX_PROMPTS or total * spec.size > MAX_VECTOR_NUMBERS:
        raise invalid(f"{fields[1]}: {len(seconds)} texts are too many for one request", fields[1])
    called.admit(total, fields[1])
    maker, model = called.model.inputs, called.model
    length = called.length
    query = [model.prompt(None, "query") + text for text in firsts]
    texts = [model.prompt(None, "document", "passage") + text for text in seconds]
    inputs = await maker.of_texts(query, length, fields[0])
    if most_of_second is not None:
        length = _cutting(length, most_of_second)
        length = msgspec.structs.replace(length, keep=min(length.keep or 0, most_of_second))
    inputs += await maker.of_texts(texts, length, fields[1])
    vectors = await called.vectors(inputs, dimensions=spec.usual_dimensions)
    left, right = vectors[: len(firsts)], vectors[len(firsts) :]
    compare = _SIMILARITIES[spec.similarity]
    return await _compared(left * len(right) if len(left) == 1 else left, right, compare)


def _cutting(length: Length, most_of_second: int | None) -> Length:
    """Return the length for documents that are to be cut, whatever else the request says."""
    if most_of_second is None or length.keep is not None:
        return length
    return msgspec.structs.replace(length, keep=length.max_tokens)


Compare = Callable[[Sequence[float], Sequence[float]], float]


async def _compared(left: Sequence[bytes], right: Sequence[bytes], compare: Compare) -> list[float]:
    """Return the similarity of each pair; others get their turn in between."""
    found, done = [], 0
    for one, other in zip(left, right, strict=True):
        a, b = array("f", one), array("f", other)
        found.append(compare(a, b))
        done += len(a)
        if done > _NUMBERS_AT_ONCE:
            done = 0
            await asyncio.sleep(0)
    return found


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
"""As sentence-transformers computes them."""
