"""Tenants: identification, permissions, and isolation of cached prompts.

A tenant is an API key, or several of the same name; without keys all clients are one tenant. With
`--tenant-by user` each value of the request field `user` is a separate tenant within its key.
Tenants are identified by digests, so they are the same in every front end of every node.
"""

from hashlib import blake2b

import msgspec

from engine.shared.messages import ROOT_SIZE
from server.access.admission_table import TENANT_SLOTS
from server.config import FrontEndConfig
from server.errors import ApiError, invalid_field

SCOPE_KEY = "swell.tenant"
"""Key in the ASGI scope under which the guard stores the tenant."""


class Tenant(msgspec.Struct, frozen=True):
    """An owner of API keys, or one of its users."""

    name: str
    """Name in logs and metrics: the operator's name of the key, or a generated one."""
    id: int
    """63 bits of a digest of the name; 0 is `EVERYBODY`."""
    slot: int = 0
    """Slot in the admission table; with too many tenants some share one."""


EVERYBODY = Tenant("", 0)


def named_tenant(name: str, slot: int = 0, shown: str | None = None) -> Tenant:
    """Return the tenant of a key's owner; `shown` replaces its name in logs and metrics."""
    return Tenant(shown or name, _digest("key", name), slot % TENANT_SLOTS)


def _digest(*parts: str) -> int:
    return int.from_bytes(_hashed(*parts, size=8)) >> 1


def _hashed(*parts: str, size: int) -> bytes:
    # Length prefixes make the encoding unambiguous.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    data = text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=size, person=b"swell tenants").digest()


class Tenancy:
    """Identifies tenants and checks their permissions, as configured."""

    def __init__(self, config: FrontEndConfig) -> None:
        self._by_user = config.tenants.tenant_by == "user"
        self._max_sequences = config.tenants.max_sequences_per_key
        self._isolated = config.tenants.prefix_cache_isolation == "tenant"
        self._priority = config.allows_priority
        self._pinning = config.allows_rank_pinning
        self.shows_cached_tokens = not config.tenants.hide_cached_tokens

    def tenant(self, key: Tenant, user: str | None) -> Tenant:
        """Return the tenant of a request, from its key and its `user` field."""
        if not self._by_user or not user:
            return key
        id_ = _digest("user", str(key.id), user)
        return Tenant(f"{key.name}/{user}", id_, id_ % TENANT_SLOTS)

    def cache_root(self, tenant: Tenant, salt: str | None) -> bytes:
        """Return the key that isolates a request's cached prefixes; empty for no isolation."""
        owner = str(tenant.id) if self._isolated else ""
        if not owner and not salt:
            return b""
        return _hashed("cache", owner, salt or "", size=ROOT_SIZE)

    def check_sequences(self, prompts: int, copies: int) -> None:
        """Refuse a request with more sequences than a tenant can ever have.

        Raises:
            ApiError: 400.
        """
        limit, sequences = self._max_sequences, prompts * copies
        if limit is not None and sequences > limit:
            raise invalid_field(
                "n" if prompts == 1 else "prompt",
                f"{sequences} sequences (prompts times choices), but an API key may have {limit} "
                "at once (max_sequences_per_key)",
                "too_many_sequences",
            )

    def check(self, priority: int | None, *, pins_rank: bool) -> None:
        """Refuse priorities or a choice of engine if the operator does not allow them.

        Raises:
            ApiError: 400 or 403.
        """
        if priority and not self._priority:
            raise invalid_field(
                "priority",
                "this server does not accept priorities from clients; send 0 or omit it",
                "priority_not_allowed",
            )
        if pins_rank and not self._pinning:
            raise ApiError(
                403,
                "X-data-parallel-rank: this server does not let clients choose an engine",
                param="X-data-parallel-rank",
                code="rank_pinning_not_allowed",
            )
