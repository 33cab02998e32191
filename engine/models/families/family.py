"""What a family of models says of itself; see docs/models.md for how to add one."""

from collections.abc import Callable
from typing import Any

import msgspec

from engine.models.spec import ModelSpec
from engine.models.weights import WeightMap

Config = dict[str, Any]
"""A decoded config.json, of the text model where there is more."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Models that are read alike; what differs in the decoder's block is data of their spec."""

    architectures: tuple[str, ...]
    """As in `architectures` of config.json."""
    spec: Callable[[Config], ModelSpec]
    """Raises UnsupportedModel, naming the setting that cannot be honoured."""
    weights: Callable[[ModelSpec], WeightMap]
    text_prefixes: tuple[str, ...] = ("model.",)
    """How names may begin, where the decoder's begin with "model."; the first is preferred."""
    not_text: tuple[str, ...] = ()
    """How names begin of what belongs to images and sound, which is not loaded."""
