"""POST /v1/responses."""

from server.api.body import read_body
from server.api.context import Context
from server.api.generation import generate
from server.api.responses.parse import parse
from server.api.responses.render import renderer
from server.api.responses.schema import ResponsesRequest
from server.http.call import Call


async def create_response(call: Call, context: Context) -> None:
    """Answer a list of items with more items; nothing is kept for a later request."""
    await generate(call, context, read_body(ResponsesRequest, call.body), parse, renderer)
