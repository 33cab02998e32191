"""POST /pooling."""

from collections.abc import Iterable
from typing import Any, cast

from fastapi import APIRouter, Response

from engine.shared.pooling import Task, TokenTask
from server.api.embeddings.endpoint import check_answer, checked_dimensions, checked_prompt
from server.api.openapi import MODEL_ERRORS, json_responses
from server.api.pooling.schema import PooledData, PoolingRequest, PoolingResponse
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors import PooledCall, inputs_of, items_shown, parts, rows, shown
from server.errors import invalid
from server.http.call import Call

router = APIRouter(route_class=ModelRoute)


@router.post("/pooling", responses=json_responses(PoolingResponse, *MODEL_ERRORS))
async def pool(body: PoolingRequest, call: Call, services: ServicesDep) -> Response:
    """Make a vector of each input, or of each of its tokens, as the model does."""
    called = PooledCall(call, services, body)
    model = called.model
    per_token = _is_per_token(body.task, called)
    dimensions = 0
    if model.spec.task == "embed":
        dimensions = checked_dimensions(body.dimensions, model)
    elif body.dimensions is not None:
        raise invalid("dimensions: this model makes scores of classes", "dimensions")
    inputs = await inputs_of(
        called,
        body.input,
        prompt=checked_prompt(body.prompt_name, model),
        add_special_tokens=body.add_special_tokens is not False,
    )
    size = dimensions or model.spec.size
    count = sum([len(each.token_ids) for each in inputs]) if per_token else len(inputs)
    check_answer(count, size)
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


def _is_per_token(task: Task | TokenTask | None, called: PooledCall) -> bool:
    """Return whether each token gets a vector.

    Raises:
        ApiError: the model is for something else, or its tokens have no vectors.
    """
    spec = called.model.spec
    if task is None:
        return spec.tokens is not None and spec.tokens.is_usual
    called.wants(task.removeprefix("token_"))
    per_token = task.startswith("token_")
    if per_token and not spec.in_one_step:
        raise invalid(
            "task: this model's prompts are computed in parts, so tokens have no vectors; "
            'serve it with --pooler-config \'{"tok_pooling_type": "ALL"}\'',
            "task",
        )
    return per_token
