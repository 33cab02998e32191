"""The description of a model family; CONTRIBUTING.md shows how to add one."""

from collections.abc import Callable

import msgspec

from engine.models.families.config import Config
from engine.models.spec import ModelSpec
from engine.models.weights import WeightMap

__all__ = ["Config", "Family"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Models whose configs and tensors are read alike; their specs describe differences."""

    architectures: tuple[str, ...]
    """Values of `architectures` in config.json."""
    spec: Callable[[Config], ModelSpec]
    """Raises UnsupportedModel, naming the unsupported setting."""
    weights: Callable[[ModelSpec], WeightMap]
    text_prefixes: tuple[str, ...] = ("model.", "")
    """Possible prefixes of stored names in place of the decoder's "model."; the first is
    preferred."""
    has_draft_layers: bool = False
    """Whether checkpoints can have draft layers after the last layer."""
    carries_normed: bool = False
    """Whether a draft layer continues from its normalized state, the LM head's input."""
    ignored: tuple[str, ...] = ()
    """Keys of published config.json files that the class of transformers does not read either."""
    reads_as: str = ""
    """For plugins: the built-in architecture whose keys, defaults and aliases config.json uses."""
    not_text: tuple[str, ...] = ()
    """Name prefixes of image and audio tensors, which are not loaded."""
