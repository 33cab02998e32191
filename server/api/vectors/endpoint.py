"""POST /v1/embeddings, /pooling and /classify: vectors of inputs."""

from collections.abc import Iterable
from typing import Any, cast

from fastapi import APIRouter, Response

from engine.shared.pooling import Task, TokenTask
from server.api.openapi import MODEL_ERRORS, json_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors.pooled_call import (
    PooledCall,
    inputs_of,
    items_shown,
    numbers,
    parts,
    rows,
    shown,
)
from server.api.vectors.schema import (
    Classified,
    ClassifyRequest,
    ClassifyResponse,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    PooledData,
    PoolingRequest,
    PoolingResponse,
)
from server.errors import invalid_field
from server.generate.pooling.inputs import PoolingModel
from server.http.call import Call
from server.limits import MAX_VECTOR_NUMBERS

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/embeddings", responses=json_responses(EmbeddingsResponse, *MODEL_ERRORS))
async def create_embeddings(body: EmbeddingsRequest, call: Call, services: ServicesDep) -> Response:
    """Make an embedding of each input."""
    called = PooledCall(call, services, body)
    called.wants("embed")
    model = called.model
    dimensions = _dimensions(body.dimensions, model)
    prompt = _prompt(body.prompt_name, model)
    inputs = await inputs_of(
        called, body.input, prompt=prompt, add_special_tokens=body.add_special_tokens is not False
    )
    _check_answer(len(inputs), dimensions or model.spec.size)
    vectors = await called.vectors(inputs, dimensions=dimensions)

    def show(index: int, vector: bytes) -> Embedding:
        return Embedding(index, shown(vector, body.encoding_format))

    payload = EmbeddingsResponse(called.name, [], called.usage)
    return called.response(payload, "data", items_shown(vectors, show))


@router.post("/pooling", responses=json_responses(PoolingResponse, *MODEL_ERRORS))
async def pool(body: PoolingRequest, call: Call, services: ServicesDep) -> Response:
    """Make a vector of each input, or of each of its tokens, as the model does."""
    called = PooledCall(call, services, body)
    model = called.model
    per_token = _is_per_token(body.task, called)
    dimensions = 0
    if model.spec.task == "embed":
        dimensions = _dimensions(body.dimensions, model)
    elif body.dimensions is not None:
        raise invalid_field("dimensions", "this model makes scores of classes")
    inputs = await inputs_of(
        called,
        body.input,
        prompt=_prompt(body.prompt_name, model),
        add_special_tokens=body.add_special_tokens is not False,
    )
    size = dimensions or model.spec.size
    count = sum([len(each.token_ids) for each in inputs]) if per_token else len(inputs)
    _check_answer(count, size)
    vectors = await called.vectors(inputs, dimensions=dimensions, per_token=per_token)

    def show(index: int, vector: bytes) -> PooledData:
        return PooledData(index, cast("Any", shown(vector, body.encoding_format)))

    shown_vectors: Iterable[Iterable[bytes]] = items_shown(vectors, show)
    if per_token and body.encoding_format != "base64":
        shown_vectors = (
            parts(PooledData(index, []), "data", rows(of_tokens, size))
            for index, of_tokens in enumerate(vectors)
        )
    payload = PoolingResponse(
        f"pool-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", shown_vectors)


@router.post("/classify", responses=json_responses(ClassifyResponse, *MODEL_ERRORS))
async def classify(body: ClassifyRequest, call: Call, services: ServicesDep) -> Response:
    """Say which class each input is of."""
    called = PooledCall(call, services, body)
    called.wants("classify")
    labels = called.model.spec.labels
    inputs = await inputs_of(
        called, body.input, add_special_tokens=body.add_special_tokens is not False
    )
    _check_answer(len(inputs), len(labels))
    vectors = await called.vectors(inputs)

    def show(index: int, vector: bytes) -> Classified:
        scores = numbers(vector)
        best = max(range(len(scores)), key=scores.__getitem__)
        return Classified(index, labels[best], scores, len(scores))

    payload = ClassifyResponse(
        f"classify-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", items_shown(vectors, show))


def _is_per_token(task: Task | TokenTask | None, called: PooledCall) -> bool:
    """Return whether each token gets a vector."""
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


def _dimensions(asked: int | None, model: PoolingModel) -> int:
    """Return how many numbers of each embedding are wanted; 0 for all."""
    size, allowed = model.spec.size, model.spec.dimensions
    if asked is None:
        return model.spec.usual_dimensions
    if asked == size:
        return 0
    if allowed is None:
        raise invalid_field(
            "dimensions",
            f"this model's embeddings have {size} numbers and were not trained to be cut",
        )
    if asked > size or (allowed and asked not in allowed):
        which = ", ".join(map(str, allowed)) if allowed else f"1 to {size}"
        raise invalid_field("dimensions", f"this model's embeddings can have {which} numbers")
    return asked


def _prompt(name: str | None, model: PoolingModel) -> str:
    """Return what stands before texts."""
    try:
        return model.prompt(name)
    except KeyError:
        known = ", ".join(model.spec.prompts) or "none"
        raise invalid_field(
            "prompt_name", f"the model's files have no prompt of that name, but {known}"
        ) from None


def _check_answer(count: int, size: int) -> None:
    """Check how large the answer gets."""
    if count * size > MAX_VECTOR_NUMBERS:
        raise invalid_field(
            "input",
            f"{count} vectors of {size} numbers are more than the {MAX_VECTOR_NUMBERS} "
            "numbers that an answer may have; send several requests",
        )
