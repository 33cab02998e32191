"""Settings of what is kept between requests."""

from typing import Annotated

from engine.shared.config import PositiveFloat, PositiveInt, Section


class StoreConfig(Section, frozen=True, kw_only=True):
    """Kept responses"""

    response_store: Annotated[
        str,
        "Where /v1/responses and /v1/conversations are kept: a file of SQLite; node: one that "
        "lives as long as the node; none: nothing is kept.",
    ] = "node"
    response_store_bytes: Annotated[
        PositiveInt, "Bytes that are kept; the tenant that has most gives way first."
    ] = 256 << 20
    response_store_age: Annotated[
        PositiveFloat, "Seconds for which something is kept after its last use."
    ] = 30 * 86_400.0
