"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, behind the admin key.

They answer when it is true everywhere: a loaded adapter can be named at every front end at once,
and one that was unloaded at none.
"""

from engine.shared.messages import AdapterOutcome
from server.api.body import read_body
from server.api.context import Context
from server.api.lora.schema import LoadLoraRequest, UnloadLoraRequest
from server.http.call import Call
from server.http.errors import ApiError, invalid


async def load_lora_adapter(call: Call, context: Context) -> None:
    """Have all engines load an adapter; then requests may name it as their model."""
    request = read_body(LoadLoraRequest, call.body)
    name = request.lora_name
    if name in context.names:
        raise invalid(f"lora_name: {name!r} is the name of the model itself", "lora_name")
    if request.base_model_name is not None and request.base_model_name not in context.names:
        raise invalid(
            f"base_model_name: the served model is {context.names[0]!r}", "base_model_name"
        )
    if "\0" in request.lora_path:
        raise invalid("lora_path: there is a zero byte in it", "lora_path")
    outcome = await context.client.change_adapter(name, request.lora_path, request.load_inplace)
    await _tell(call, outcome, f"Success: LoRA adapter '{name}' added successfully.", "lora_path")


async def unload_lora_adapter(call: Call, context: Context) -> None:
    """Stop taking requests for an adapter; those that run end with it."""
    name = read_body(UnloadLoraRequest, call.body).lora_name
    outcome = await context.client.change_adapter(name)
    await _tell(call, outcome, f"Success: LoRA adapter '{name}' removed successfully.", "lora_name")


async def _tell(call: Call, outcome: AdapterOutcome, success: str, param: str) -> None:
    status = outcome.status
    if status != 200:
        code = {404: "adapter_not_found", 503: "unavailable"}.get(status, "bad_adapter")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        raise ApiError(status, outcome.reason, param=param, code=code, kind=kind)
    body = success.encode()
    length = (b"content-length", str(len(body)).encode())
    await call.start(200, [(b"content-type", b"text/plain; charset=utf-8"), length])
    await call.write(body, more=False)
