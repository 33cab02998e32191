"""Settings of overload, tenants, and request routing."""

from typing import Annotated, Literal

from engine.shared.config import (
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Section,
)
from server.router.routing import POLICIES


class OverloadConfig(Section, frozen=True, kw_only=True):
    """Overload"""

    max_queue: Annotated[
        NonNegativeInt,
        "Maximum sequences that wait on this node beyond those that its engines can run; "
        "requests beyond it get 429.",
    ] = 2048
    max_queue_tokens: Annotated[
        PositiveInt | None,
        "Maximum prompt tokens that wait on this node; requests beyond it get 429; default: no "
        "limit.",
    ] = None


class TenantConfig(Section, frozen=True, kw_only=True):
    """Tenants"""

    tenant_by: Annotated[
        Literal["key", "user"],
        "Who counts as a tenant, with a fair share and limits of its own; key: each API key "
        "(keys of the same name are one); user: also each value of the request field user. "
        "Use user only behind a gateway that sets this field: a client that sets it itself "
        "can pretend to be many.",
    ] = "key"
    max_sequences_per_key: Annotated[
        PositiveInt | None,
        "Maximum sequences of one key (or user, see --tenant-by) in the cluster at once; "
        "requests beyond it get 429; default: as many as the other tenants leave free.",
    ] = None
    max_queue_tokens_per_key: Annotated[
        PositiveInt | None,
        "Maximum prompt tokens of one key (or user) that wait in the cluster; requests beyond it "
        "get 429; default: with --max-queue-tokens, as many as the other tenants leave free; "
        "else no limit.",
    ] = None
    prefix_cache_isolation: Annotated[
        Literal["none", "tenant"],
        "Which requests share cached prompts; none: all with the same cache_salt; tenant: "
        "only those of the same key (or user).",
    ] = "none"
    hide_cached_tokens: Annotated[
        bool, "Do not tell clients how many tokens of a prompt were cached."
    ] = False
    allow_priority: Annotated[
        bool | None,
        "Let clients send a priority; default: only if there is no API key and "
        "--scheduling-policy is priority.",
    ] = None
    allow_rank_pinning: Annotated[
        bool | None,
        "Let clients choose an engine with the header X-data-parallel-rank; default: only if "
        "there is no API key.",
    ] = None

    @property
    def has_limits(self) -> bool:
        """Whether a tenant's work in flight is limited."""
        limits = (self.max_sequences_per_key, self.max_queue_tokens_per_key)
        return any(limit is not None for limit in limits)


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Routing"""

    routing_policy: Annotated[
        str,
        OneOf(tuple(POLICIES), "swell.routing_policies"),
        "Which engine gets a request; "
        + "".join(f"{name}: {policy.help}; " for name, policy in POLICIES.items())
        + "or the name of a plugin.",
    ] = "least-loaded"
    routing_index_blocks: Annotated[
        PositiveInt,
        "KV blocks that an API server remembers for prefix-aware routing, about 80 bytes each; "
        "engines have equal shares, and a block beyond them counts as not cached.",
    ] = 2_000_000
    prefill_split_length: Annotated[
        PositiveInt,
        "Minimum prompt tokens to compute (without those known to be cached) for which a prompt "
        "goes to an engine with --kv-role prefill first, if there is one.",
    ] = 512
    allow_kv_transfer_params: Annotated[
        bool,
        "Accept kv_transfer_params, with which an external router transfers KV blocks between "
        "servers. They contain addresses that engines connect to, so let only your router reach "
        "this server.",
    ] = False
    min_ready_engines: Annotated[
        PositiveInt,
        "Number of engines that must be ready before /ready answers 200 for the first time, "
        "so that load balancers wait until there are enough; afterwards one is enough.",
    ] = 1
    max_resumes: Annotated[
        NonNegativeInt,
        "Engine crashes a request may survive before it is isolated.",
    ] = 1
    resume_timeout: Annotated[
        PositiveFloat, "Seconds that a request waits for another engine after losing its own."
    ] = 30.0
    halted_timeout: Annotated[
        PositiveFloat,
        "Seconds that a request waits while operators have all engines paused or asleep; then it "
        "gets 503.",
    ] = 300.0
    cold_start_timeout: Annotated[
        NonNegativeFloat,
        "Seconds that a new request waits while there is no engine at all, as when an autoscaler "
        "has taken the last one; /ready answers 200 then. 0: it gets 503 at once.",
    ] = 0.0
