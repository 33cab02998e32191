"""POST /classify: request and response."""

from typing import ClassVar, Literal

import msgspec

from server.schema.pooling import NO_TURNS, Input, PoolingFields, PoolingUsage
from server.schema.support import Rows


class ClassifyRequest(PoolingFields):
    """Texts, or token ids, to classify."""

    input: Input
    add_special_tokens: bool | None = True

    undeclared: ClassVar[Rows] = NO_TURNS


class Classified(msgspec.Struct):
    """What class an input is of."""

    index: int
    label: str
    """The class with the highest score."""
    probs: list[float]
    """The score of each class."""
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    """The class of each input, in order."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage
    object: Literal["list"] = "list"
