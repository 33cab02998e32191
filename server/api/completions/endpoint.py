"""POST /v1/completions."""

from server.api.body import read_body
from server.api.completions.parse import parse
from server.api.completions.render import renderer
from server.api.completions.schema import CompletionRequest
from server.api.context import Context
from server.api.generation import generate
from server.http.call import Call


async def create_completion(call: Call, context: Context) -> None:
    """Continue prompts."""
    await generate(call, context, read_body(CompletionRequest, call.body), parse, renderer)
