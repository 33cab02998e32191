"""The description of a model family; CONTRIBUTING.md shows how to add one."""

from collections.abc import Callable

import msgspec

from engine.models.families.config import Config
from engine.models.spec import ModelSpec
from engine.models.weights import WeightMap

__all__ = ["Config", "Family"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Models that are read alike; how their decoder blocks differ is data of their specs."""

    architectures: tuple[str, ...]
    """As in `architectures` of config.json."""
    spec: Callable[[Config], ModelSpec]
    """Raises UnsupportedModel, naming the setting that cannot be honoured."""
    weights: Callable[[ModelSpec], WeightMap]
    text_prefixes: tuple[str, ...] = ("model.", "")
    """Prefixes that names may have where the decoder's have "model."; the first is preferred."""
    has_draft_layers: bool = False
    """Whether checkpoints may have layers behind the last, which draft tokens."""
    carries_normed: bool = False
    """Whether such a layer goes on from its own state normalized, as the LM head sees it."""
    ignored: tuple[str, ...] = ()
    """Keys of published config.json files that the class of transformers does not read either."""
    reads_as: str = ""
    """For plugins: the built-in architecture whose keys, defaults and aliases config.json has."""
    not_text: tuple[str, ...] = ()
    """Prefixes of the names of tensors for images and sound, which are not loaded."""
