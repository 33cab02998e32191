"""POST /classify."""

from fastapi import APIRouter, Response

from server.api.classify.schema import Classified, ClassifyRequest, ClassifyResponse
from server.api.embeddings.endpoint import check_answer
from server.api.openapi import MODEL_ERRORS, json_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.api.vectors import PooledCall, inputs_of, items_shown, numbers
from server.http.call import Call

router = APIRouter(route_class=ModelRoute)


@router.post("/classify", responses=json_responses(ClassifyResponse, *MODEL_ERRORS))
async def classify(body: ClassifyRequest, call: Call, services: ServicesDep) -> Response:
    """Say which class each input is of."""
    called = PooledCall(call, services, body)
    called.wants("classify")
    labels = called.model.spec.labels
    inputs = await inputs_of(
        called, body.input, add_special_tokens=body.add_special_tokens is not False
    )
    check_answer(len(inputs), len(labels))
    vectors = await called.vectors(inputs)

    def show(index: int, vector: bytes) -> Classified:
        scores = numbers(vector)
        best = max(range(len(scores)), key=scores.__getitem__)
        return Classified(index, labels[best], scores, len(scores))

    payload = ClassifyResponse(
        f"classify-{called.request_id}", called.created, called.name, [], called.usage
    )
    return called.response(payload, "data", items_shown(vectors, show))
