"""What all request bodies are built on."""

from typing import Any

from pydantic import BaseModel, ConfigDict

JsonObject = dict[str, Any]


class RequestBody(BaseModel):
    """Base of all request bodies: JSON types are not converted, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
