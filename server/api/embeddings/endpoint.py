"""POST /v1/embeddings."""

from fastapi import APIRouter, Response

from server.api.embeddings.schema import Embedding, EmbeddingsRequest, EmbeddingsResponse
from server.api.openapi import MODEL_ERRORS, json_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors import PooledCall, inputs_of, items_shown, shown
from server.errors import invalid
from server.generate.pooling.model import PoolingModel
from server.http.call import Call
from server.limits import MAX_VECTOR_NUMBERS

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/embeddings", responses=json_responses(EmbeddingsResponse, *MODEL_ERRORS))
async def create_embeddings(body: EmbeddingsRequest, call: Call, services: ServicesDep) -> Response:
    """Make an embedding of each input."""
    called = PooledCall(call, services, body)
    called.wants("embed")
    model = called.model
    dimensions = checked_dimensions(body.dimensions, model)
    prompt = checked_prompt(body.prompt_name, model)
    inputs = await inputs_of(
        called, body.input, prompt=prompt, add_special_tokens=body.add_special_tokens is not False
    )
    check_answer(len(inputs), dimensions or model.spec.size)
    vectors = await called.vectors(inputs, dimensions=dimensions)

    def show(index: int, vector: bytes) -> Embedding:
        return Embedding(index, shown(vector, body.encoding_format))

    payload = EmbeddingsResponse(called.name, [], called.usage)
    return called.response(payload, "data", items_shown(vectors, show))


def checked_dimensions(asked: int | None, model: PoolingModel) -> int:
    """Return how many numbers of each embedding are wanted; 0 for all.

    Raises:
        ApiError: the model was not trained for so few, or has fewer.
    """
    size, allowed = model.spec.size, model.spec.dimensions
    if asked is None:
        return model.spec.usual_dimensions
    if asked == size:
        return 0
    if allowed is None:
        raise invalid(
            f"dimensions: this model's embeddings have {size} numbers and were not trained to be "
            "cut",
            "dimensions",
        )
    if asked > size or (allowed and asked not in allowed):
        which = ", ".join(map(str, allowed)) if allowed else f"1 to {size}"
        raise invalid(f"dimensions: this model's embeddings can have {which} numbers", "dimensions")
    return asked


def checked_prompt(name: str | None, model: PoolingModel) -> str:
    """Return what stands before texts.

    Raises:
        ApiError: the model has no prompt of that name.
    """
    try:
        return model.prompt(name)
    except KeyError:
        known = ", ".join(model.spec.prompts) or "none"
        raise invalid(
            f"prompt_name: the model's files have no prompt of that name, but {known}",
            "prompt_name",
        ) from None


def check_answer(count: int, size: int) -> None:
    """Check how large the answer gets.

    Raises:
        ApiError: too large.
    """
    if count * size > MAX_VECTOR_NUMBERS:
        raise invalid(
            f"input: {count} vectors of {size} numbers are more than the {MAX_VECTOR_NUMBERS} "
            "numbers that an answer may have; send several requests",
            "input",
        )
