"""Settings of what is kept between requests."""

from typing import Annotated, Any

from engine.shared.config import PositiveFloat, PositiveInt, Section


class StoreConfig(Section, frozen=True, kw_only=True):
    """Kept responses"""

    response_store: Annotated[
        str,
        "Where /v1/responses and /v1/conversations are kept: a file of SQLite; a database of "
        "PostgreSQL by its URL, for all nodes (needs `swell[postgres]`); node: a file that lives "
        "as long as the node; none: nothing is kept.",
    ] = "node"
    response_store_bytes: Annotated[
        PositiveInt, "Bytes that are kept; the tenant that has most gives way first."
    ] = 256 << 20
    response_store_age: Annotated[
        PositiveFloat, "Seconds for which something is kept after its last use."
    ] = 30 * 86_400.0

    @property
    def is_postgres(self) -> bool:
        """Whether the store is a PostgreSQL database."""
        return self.response_store.startswith(("postgresql://", "postgres://"))

    def __repr__(self) -> str:
        return "StoreConfig(...)"  # the URL may hold a password

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []
