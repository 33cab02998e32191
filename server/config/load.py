"""Settings of overload, of tenants, and of which engine gets a request."""

from typing import Annotated, Literal

from engine.shared.config import NonNegativeInt, PositiveFloat, PositiveInt, Section


class OverloadConfig(Section, frozen=True, kw_only=True):
    """Overload"""

    max_queue: Annotated[
        NonNegativeInt,
        "Maximum sequences that wait on this node beyond those that the engines can run; more "
        "are answered with 429.",
    ] = 2048
    max_queue_tokens: Annotated[
        PositiveInt | None,
        "Maximum prompt tokens that wait on this node to be computed; more are answered with "
        "429; default: no limit.",
    ] = None


class TenantConfig(Section, frozen=True, kw_only=True):
    """Tenants"""

    tenant_by: Annotated[
        Literal["key", "user"],
        "Who shares the server fairly and is limited: key = each API key (keys of one name are "
        "one); user = each value of the field user as well, for servers behind a gateway that "
        "fills it in: whoever may name users can be many.",
    ] = "key"
    max_sequences_per_key: Annotated[
        PositiveInt | None,
        "Maximum sequences of one key (or user, see --tenant-by) on this node at once; more are "
        "answered with 429; default: as many as are left free to others.",
    ] = None
    max_queue_tokens_per_key: Annotated[
        PositiveInt | None,
        "Maximum prompt tokens of one key (or user) that wait on this node to be computed; more "
        "are answered with 429; default: with --max-queue-tokens as many as are left free to "
        "others, else no limit.",
    ] = None
    prefix_cache_isolation: Annotated[
        Literal["none", "tenant"],
        "Who finds whose prompts in the prefix cache: none = everybody everybody's with the same "
        "cache_salt; tenant = each key (or user) only its own.",
    ] = "none"
    hide_cached_tokens: Annotated[
        bool, "Do not tell clients how much of a prompt was in the prefix cache."
    ] = False
    allow_priority: Annotated[
        bool | None,
        "Whether clients may send a priority; default: if there are no API keys and this node's "
        "--scheduling-policy is not fcfs.",
    ] = None
    allow_rank_pinning: Annotated[
        bool | None,
        "Whether clients may choose an engine with the header X-data-parallel-rank; default: if "
        "there are no API keys.",
    ] = None


class RoutingConfig(Section, frozen=True, kw_only=True):
    """Routing"""

    routing_policy: Annotated[
        Literal["least-loaded", "prefix-affinity", "power-of-two", "round-robin"],
        "Which engine gets a request: the one with the least work; the one that got a prompt "
        "that begins alike, while it is not much busier; the less loaded of two drawn at random; "
        "one after the other.",
    ] = "least-loaded"
    max_resumes: Annotated[
        NonNegativeInt,
        "How often a request may be moved away from an engine that died before it has to run "
        "alone.",
    ] = 1
    resume_timeout: Annotated[
        PositiveFloat, "Seconds that a moved request waits for an engine to take it over."
    ] = 30.0
