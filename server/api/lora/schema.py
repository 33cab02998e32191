"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: requests."""

from pydantic import Field

from engine.shared.config import MAX_NAME_SIZE
from server.schema.body import Name, RequestBody

MAX_PATH_SIZE = 4096


class LoadLoraRequest(RequestBody):
    """An adapter to serve beside the model."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_SIZE)
    lora_path: str = Field(
        min_length=1,
        max_length=MAX_PATH_SIZE,
        description="Directory as PEFT writes it, on the engines' nodes, below --lora-dir.",
    )
    load_inplace: bool = Field(
        False, description="Replace an adapter of the same name; requests that run keep theirs."
    )
    base_model_name: Name | None = Field(None, description="Refuse if another model is served.")


class UnloadLoraRequest(RequestBody):
    """An adapter that shall not be served any more."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_SIZE)
