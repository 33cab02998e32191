"""What all request bodies are built on."""

from typing import Any

from pydantic import BaseModel, ConfigDict

JsonObject = dict[str, Any]


def part_type(part: Any) -> str:
    """Tell pieces of messages that refuse from those that say something, by their tags.

    The tags are no names of fields, so that they are told apart where errors are located.
    """
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "a text"


class RequestBody(BaseModel):
    """Base of all request bodies: JSON types are not converted, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
