"""Which tenant sends a request, what it may do, and with whom it shares cached prompts.

A tenant is an API key, or several of the same name; without keys all clients are one tenant. With
`--tenant-by user` each value of a request's field `user` is a tenant of its own within its key.
Tenants are known by digests, so they are the same ones in every front end of every node.
"""

from hashlib import blake2b

import msgspec

from engine.shared.messages import ROOT_SIZE
from server.access.admission_table import PLACES
from server.config import FrontEndConfig
from server.errors import ApiError

SCOPE_KEY = "swell.tenant"
"""Under which the guard notes the tenant in the scope of a request."""


class Tenant(msgspec.Struct, frozen=True):
    """A holder of API keys, or one of its users, among those who share the server."""

    name: str
    """For logs and metrics: what the operator calls the key, or its number."""
    id: int
    """63 bits of a digest of the name; 0 is everybody."""
    place: int = 0
    """Where it is counted in the admission table; if they are too many, some share a place."""


EVERYBODY = Tenant("", 0)


def named_tenant(name: str, place: int = 0, shown: str | None = None) -> Tenant:
    """Return the tenant of keys of this name; logs and metrics have the name that is `shown`."""
    return Tenant(shown or name, _digest("key", name), place % PLACES)


def _digest(*parts: str) -> int:
    return int.from_bytes(_hashed(*parts, size=8)) >> 1


def _hashed(*parts: str, size: int) -> bytes:
    # Lengths between the parts, so that no two lists of parts are hashed alike.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    data = text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=size, person=b"swell tenants").digest()


class Tenancy:
    """Tells tenants apart and says what they may do, as configured."""

    def __init__(self, config: FrontEndConfig) -> None:
        self._by_user = config.tenants.tenant_by == "user"
        self._max_sequences = config.tenants.max_sequences_per_key
        self._isolated = config.tenants.prefix_cache_isolation == "tenant"
        self._priority = config.allows_priority
        self._pinning = config.allows_rank_pinning
        self.shows_cached_tokens = not config.tenants.hide_cached_tokens

    def tenant(self, key: Tenant, user: str | None) -> Tenant:
        """Return whose a request is that came with a key and names a user."""
        if not self._by_user or not user:
            return key
        id_ = _digest("user", str(key.id), user)
        return Tenant(f"{key.name}/{user}", id_, id_ % PLACES)

    def cache_root(self, tenant: Tenant, salt: str | None) -> bytes:
        """Return what sets a request's cached prefixes apart; empty where nothing does."""
        owner = str(tenant.id) if self._isolated else ""
        if not owner and not salt:
            return b""
        return _hashed("cache", owner, salt or "", size=ROOT_SIZE)

    def check_sequences(self, prompts: int, copies: int) -> None:
        """Refuse a request that is more than a tenant may ever have.

        Raises:
            ApiError: 400.
        """
        most, sequences = self._max_sequences, prompts * copies
        if most is not None and sequences > most:
            param = "n" if prompts == 1 else "prompt"
            raise ApiError(
                400,
                f"{param}: {sequences} sequences (prompts times choices), but an API key may have "
                f"{most} at once (max_sequences_per_key)",
                param=param,
                code="too_many_sequences",
            )

    def check(self, priority: int | None, *, pins_rank: bool) -> None:
        """Refuse what only some operators allow: priorities, or the choice of an engine.

        Raises:
            ApiError: 400 or 403.
        """
        if priority and not self._priority:
            raise ApiError(
                400,
                "priority: this server does not accept priorities from clients; send 0 or omit it",
                param="priority",
                code="priority_not_allowed",
            )
        if pins_rank and not self._pinning:
            raise ApiError(
                403,
                "X-data-parallel-rank: this server does not let clients choose an engine",
                param="X-data-parallel-rank",
                code="rank_pinning_not_allowed",
            )
