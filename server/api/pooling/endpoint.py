"""POST /pooling."""

from typing import cast

from server.api.body import read_body
from server.api.context import Context
from server.api.embeddings.endpoint import check_answer, checked_dimensions, checked_prompt
from server.api.pooling.schema import PooledData, PoolingRequest, PoolingResponse
from server.api.vectors import PooledCall, encoded, inputs_of, shown
from server.http.call import Call
from server.http.errors import invalid


async def pool(call: Call, context: Context) -> None:
    """Make a vector of each input, as the model does."""
    body = read_body(PoolingRequest, call.body)
    called = PooledCall(call, context, body)
    model = called.model
    if body.task is not None:
        called.wants(body.task)
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
    check_answer(len(inputs), dimensions or model.spec.size)
    vectors = await called.vectors(inputs, dimensions=dimensions)

    def show(index: int, vector: bytes) -> PooledData:
        return PooledData(index, shown(vector, body.encoding_format))

    data = cast("list[PooledData]", await encoded(vectors, show))
    await called.send(
        PoolingResponse(
            f"pool-{called.request_id}", called.created, called.name, data, called.usage
        )
    )
