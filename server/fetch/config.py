"""Settings of `swell fetch` and `swell models`; see `engine.shared.config.section`."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import Section


class FetchTarget(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[str, "Hub id of the model, or org/name:Q4_K_M for one GGUF file."] = ""
    revision: Annotated[str | None, "Branch, tag or commit of a model from the hub."] = None
    text_only: Annotated[
        bool, "Fetch tokenizer and configuration only, which is all that API servers need."
    ] = False


class ShardedTarget(Section, frozen=True, kw_only=True):
    """Sharded state"""

    model: Annotated[str, "Directory of the model, or the hub id of one that was fetched."] = ""
    output: Annotated[str, "Directory that is made for the parts."] = ""
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64), "Processes that the weights are cut for."
    ] = 2


class ShardedConfig(Section, frozen=True, kw_only=True):
    """All that `swell save-sharded-state` needs to know."""

    sharded: ShardedTarget = ShardedTarget()


class CachedModels(Section, frozen=True, kw_only=True):
    """Models"""

    remove: Annotated[str, "Hub id of a model to remove from the cache."] = ""


class CachedConfig(Section, frozen=True, kw_only=True):
    """All that `swell models` needs to know."""

    models: CachedModels = CachedModels()


class FetchConfig(Section, frozen=True, kw_only=True):
    """All that `swell fetch` needs to know."""

    fetch: FetchTarget = FetchTarget()
