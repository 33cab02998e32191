"""What the server tells about itself."""

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    """A name by which the served model may be called."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    parent: str | None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    """All served names."""

    data: list[Model]
    object: Literal["list"] = "list"


class HealthResponse(msgspec.Struct):
    """This process lives, or takes traffic."""

    status: str


class VersionResponse(msgspec.Struct):
    """Version of the distribution."""

    version: str
