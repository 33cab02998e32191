"""Settings of `swell fetch` and `swell models`; see `engine.shared.config.section`."""

from typing import Annotated

from engine.shared.config import Section


class FetchTarget(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[str, "Hub id of the model, or org/name:Q4_K_M for one GGUF file."] = ""
    revision: Annotated[str | None, "Branch, tag or commit of a model from the hub."] = None
    text_only: Annotated[
        bool, "Fetch tokenizer and configuration only, which is all that API servers need."
    ] = False


class CachedModels(Section, frozen=True, kw_only=True):
    """Models"""

    remove: Annotated[str, "Hub id of a model to remove from the cache."] = ""


class CachedConfig(Section, frozen=True, kw_only=True):
    """All that `swell models` needs to know."""

    models: CachedModels = CachedModels()


class FetchConfig(Section, frozen=True, kw_only=True):
    """All that `swell fetch` needs to know."""

    fetch: FetchTarget = FetchTarget()
