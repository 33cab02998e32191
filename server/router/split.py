"""Which prompts are computed by other engines than those that answer.

Engines whose setup says `prefill` compute long prompts and nothing else, while there are engines
that `decode`, and offer the KV blocks to these; see `engine.kv_transfer`. Without engines of one
kind those of the other do all. Pure decisions; `server.router.delivery` carries them out.
"""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import AddRequest, KvSource, SamplingParams
from server.router.request import RoutedRequest
from server.router.route import Route
from server.router.routing import EngineLoad, RoutingPolicy

MAX_QUEUED = 8
"""In minimum split lengths: queued tokens that a prefill engine may have more than the answering
engine."""
MAX_QUEUED_LIKE_IT = 2
"""In lengths of the prompt: the same, if that is more."""


class Split:
    """Decides for one front end.

    Args:
        min_tokens: minimum tokens to compute of a prompt that goes to a prefill engine.
        policy: chooses among prefill engines.
    """

    def __init__(self, min_tokens: int, policy: RoutingPolicy) -> None:
        self.policy = policy
        self._min_tokens = min_tokens

    def answering(self, message: AddRequest, usable: list[Route]) -> list[Route]:
        """Return the engines that may answer a request: all, if there are only prefill engines.

        One whose blocks another server is to read goes to an engine that offers them.
        """
        if message.offers_blocks:
            return [route for route in usable if route.offers_blocks] or usable
        return [route for route in usable if route.kv_role != "prefill"] or usable

    def prefilling(
        self, request: RoutedRequest, usable: Sequence[Route], answers: Route, cached_tokens: int
    ) -> list[Route]:
        """Return the engines that may compute a request's prompt; none if the answering one does.

        Args:
            answers: the engine that would be chosen to answer.
            cached_tokens: what that is known to have cached of it.
        """
        message = request.message
        uncached = message.num_tokens + len(request.output_token_ids) - cached_tokens
        if (
            answers.kv_role not in ("decode", "both")
            or uncached < self._min_tokens
            or message.alone
            or message.offers_blocks
            or message.kv_source is not None
            or message.pooling is not None
            or (message.sampling.prompt_logprobs is not None and not draws_one_token(request))
        ):
            return []
        return [
            route for route in usable if route.kv_role == "prefill" and _are_alike(route, answers)
        ]

    def keeps_up(self, request: RoutedRequest, prefill: EngineLoad, answers: EngineLoad) -> bool:
        """Whether a prefill engine's queue is short enough for the split to be worth it."""
        queued = prefill.prefill_tokens - answers.prefill_tokens
        longest = MAX_QUEUED_LIKE_IT * request.message.num_tokens
        return queued <= max(MAX_QUEUED * self._min_tokens, longest)


def draws_one_token(request: RoutedRequest) -> bool:
    """Whether nothing follows the token that computing the prompt gives.

    Who computes the prompt answers such a request: a step of a beam search, or a prompt's scores.
    """
    return request.message.sampling.max_tokens - len(request.output_token_ids) == 1


def _are_alike(one: Route, other: Route) -> bool:
    """Whether engines can read each other's blocks, as far as they say."""
    first, second = one.entry.setup, other.entry.setup
    return (
        first is not None
        and second is not None
        and bool(first.kv_address)
        and (first.model_fingerprint, first.kv_cache_dtype, first.block_size)
        == (second.model_fingerprint, second.kv_cache_dtype, second.block_size)
    )


def prefill_of(message: AddRequest) -> AddRequest:
    """Return what a prefill engine is asked: to compute a request's tokens, and offer their blocks.

    It draws one token, which is dropped: the answering engine draws it again.
    """
    drawn = SamplingParams(
        max_tokens=len(message.output_token_ids) + 1, seed=0, temperature=0.0, ignore_eos=True
    )
    return msgspec.structs.replace(message, sampling=drawn, offers_blocks=True)


def answer_of(message: AddRequest, prefilled_by: Route | None) -> AddRequest:
    """Return what an answering engine is asked after the prefill engine, which may have gone."""
    setup = None if prefilled_by is None else prefilled_by.entry.setup
    if prefilled_by is None or setup is None:
        return message
    source = KvSource(setup.kv_address, prefilled_by.entry.incarnation)
    return msgspec.structs.replace(message, kv_source=source)
