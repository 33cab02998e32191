"""Settings of `swell fetch`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from engine.shared.config import Section


class FetchTarget(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[str, "Hub id of the model to fetch."] = ""
    revision: Annotated[str | None, "Branch, tag or commit of a model from the hub."] = None
    text_only: Annotated[
        bool, "Fetch tokenizer and configuration only, which is all that API servers need."
    ] = False


class FetchConfig(Section, frozen=True, kw_only=True):
    """All that `swell fetch` needs to know."""

    fetch: FetchTarget = FetchTarget()
