"""POST /classify."""

from server.api.body import read_body
from server.api.classify.schema import Classified, ClassifyRequest, ClassifyResponse
from server.api.context import Context
from server.api.embeddings.endpoint import check_answer
from server.api.vectors import PooledCall, inputs_of, items_shown, numbers
from server.http.call import Call


async def classify(call: Call, context: Context) -> None:
    """Say which class each input is of."""
    body = read_body(ClassifyRequest, call.body)
    called = PooledCall(call, context, body)
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
    await called.send(payload, "data", items_shown(vectors, show))
