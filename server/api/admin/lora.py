"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, behind the admin key.

They answer when it is true everywhere: a loaded adapter can be named at every front end at once,
and one that was unloaded at none.
"""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from engine.shared.messages import AdapterOutcome
from server.api.admin.schema import LoadLoraRequest, UnloadLoraRequest
from server.api.openapi import text_responses
from server.api.route import ApiRoute
from server.api.services import ServicesDep
from server.errors import ApiError, invalid_field

_CHANGED = text_responses(
    400, 403, 404, 413, 415, 503, kind="text/plain; charset=utf-8", text="It is done."
)

router = APIRouter(route_class=ApiRoute)


@router.post("/v1/load_lora_adapter", responses=_CHANGED)
async def load_lora_adapter(body: LoadLoraRequest, services: ServicesDep) -> Response:
    """Have all engines load an adapter; then requests may name it as their model."""
    name = body.lora_name
    if name in services.names:
        raise invalid_field("lora_name", f"{name!r} is the name of the model itself")
    if body.base_model_name is not None and body.base_model_name not in services.names:
        raise invalid_field("base_model_name", f"the served model is {services.names[0]!r}")
    if "\0" in body.lora_path:
        raise invalid_field("lora_path", "must not contain a NUL byte")
    outcome = await services.client.change_adapter(name, body.lora_path, body.load_inplace)
    return _answer(outcome, f"Success: LoRA adapter '{name}' added successfully.", "lora_path")


@router.post("/v1/unload_lora_adapter", responses=_CHANGED)
async def unload_lora_adapter(body: UnloadLoraRequest, services: ServicesDep) -> Response:
    """Stop taking requests for an adapter; those that run end with it."""
    name = body.lora_name
    outcome = await services.client.change_adapter(name)
    return _answer(outcome, f"Success: LoRA adapter '{name}' removed successfully.", "lora_name")


def _answer(outcome: AdapterOutcome, success: str, param: str) -> Response:
    status = outcome.status
    if status != 200:
        code = {404: "adapter_not_found", 503: "unavailable"}.get(status, "bad_adapter")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        raise ApiError(status, outcome.reason, param=param, code=code, kind=kind)
    return PlainTextResponse(success)
