"""Settings of `swell status`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from engine.shared.config import Section


class StatusTarget(Section, frozen=True, kw_only=True):
    """Status"""

    url: Annotated[str, "Base address of an API server of the node."] = "http://127.0.0.1:8000"
    admin_key: Annotated[
        str | None,
        "The node's --admin-key, better given as SWELL_ADMIN_KEY; without it engines that have "
        "not joined are not shown.",
    ] = None


class StatusConfig(Section, frozen=True, kw_only=True):
    """All that `swell status` needs to know."""

    status: StatusTarget = StatusTarget()
