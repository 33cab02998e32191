"""POST /v1/completions."""

from fastapi import APIRouter, Response

from server.api.completions.parse import parse
from server.api.completions.render import renderer
from server.api.completions.schema import CompletionRequest, CompletionResponse
from server.api.generation import Generation
from server.api.openapi import REQUEST_HEADERS, stream_responses
from server.api.route import ModelRoute
from server.api.services import ServicesDep
from server.http.call import Call

COMPLETION_RESPONSES = stream_responses(CompletionResponse, CompletionResponse)

router = APIRouter(route_class=ModelRoute)


@router.post("/v1/completions", responses=COMPLETION_RESPONSES, openapi_extra=REQUEST_HEADERS)
async def create_completion(body: CompletionRequest, call: Call, services: ServicesDep) -> Response:
    """Continue prompts."""
    return Generation(call, services, body, parse, renderer)
