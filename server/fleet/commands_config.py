"""Settings of `swell scale` and `swell status` (conventions: `engine.shared.config.section`)."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import Section


class ScaleTarget(Section, frozen=True, kw_only=True):
    """Scaling"""

    url: Annotated[str, "Base address of an API server of the node."] = "http://127.0.0.1:8000"
    admin_key: Annotated[str | None, "The node's --admin-key; better given as SWELL_ADMIN_KEY."] = (
        None
    )
    size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        "Number of engines; without it only shows what there is.",
    ] = None


class ScaleConfig(Section, frozen=True, kw_only=True):
    """All that `swell scale` needs to know."""

    scale: ScaleTarget = ScaleTarget()


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
