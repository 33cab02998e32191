"""Settings of the response store."""

from typing import Annotated, Any

from engine.shared.config import PositiveFloat, PositiveInt, Section


class StoreConfig(Section, frozen=True, kw_only=True):
    """Kept responses"""

    response_store: Annotated[
        str,
        "Where /v1/responses and /v1/conversations are stored: a path: in this SQLite file; a "
        "postgresql:// URL: in a database for all nodes (needs `swell[postgres]`); node: in a"
        " file that is deleted when the node stops; none: nowhere.",
    ] = "node"
    response_store_bytes: Annotated[
        PositiveInt,
        "Maximum bytes that are kept; an eighth of the file system, at most 64 MiB, stays free, "
        "too. Beyond it, the tenant that keeps the most loses its oldest entries.",
    ] = 256 << 20
    response_store_age: Annotated[
        PositiveFloat,
        "Seconds for which responses and conversations are kept after their last use.",
    ] = 30 * 86_400.0

    @property
    def is_postgres(self) -> bool:
        """Whether the store is a PostgreSQL database."""
        return self.response_store.startswith(("postgresql://", "postgres://"))

    def __repr__(self) -> str:
        return "StoreConfig(...)"  # the URL may hold a password

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []
