"""Disaggregated prefill: which prompts are computed by separate engines.

Engines with the role `prefill` compute only long prompts, while there are `decode` engines, and
offer the KV blocks to them; see `engine.kv`. If engines of one role are missing, those of
the other do everything. Pure decisions; `server.router.delivery` carries them out.
"""

from collections.abc import Sequence

import msgspec

from engine.shared.messages import AddRequest, KvSource, SamplingParams
from server.router.request import RoutedRequest
from server.router.route import Route
from server.router.routing import EngineLoad, RoutingPolicy

MAX_QUEUED = 8
"""Maximum queued tokens by which a prefill engine can exceed the answering engine, in minimum split
lengths."""
MAX_QUEUED_IN_PROMPTS = 2
"""The same in prompt lengths; the larger limit applies."""


class Split:
    """Split decisions of one front end.

    Args:
        min_tokens: minimum uncached prompt tokens for a separate prefill.
        policy: chooses among prefill engines.
    """

    def __init__(self, min_tokens: int, policy: RoutingPolicy) -> None:
        self.policy = policy
        self._min_tokens = min_tokens

    def answering(self, message: AddRequest, usable: list[Route]) -> list[Route]:
        """Return the engines that can answer a request: all, if there are only prefill engines.

        A request whose blocks another server will read goes to an engine that offers them.
        """
        if message.offers_blocks:
            return [route for route in usable if route.offers_blocks] or usable
        return [route for route in usable if route.kv_role != "prefill"] or usable

    def prefilling(
        self, request: RoutedRequest, usable: Sequence[Route], answers: Route, cached_tokens: int
    ) -> list[Route]:
        """Return the engines that can compute a request's prompt; none if it is not split.

        Args:
            answers: the engine that would be chosen to answer.
            cached_tokens: prompt tokens known to be cached on that engine.
        """
        message = request.message
        uncached = message.num_tokens + len(request.output_token_ids) - cached_tokens
        if (
            answers.kv_role not in ("decode", "both")
            or uncached < self._min_tokens
            or message.exclusive_steps
            or message.offers_blocks
            or message.kv_source is not None
            or message.pooling is not None
            or (message.sampling.prompt_logprobs is not None and not draws_one_token(request))
        ):
            return []
        return [
            route
            for route in usable
            if route.kv_role == "prefill" and _are_compatible(route, answers)
        ]

    def keeps_up(self, request: RoutedRequest, prefill: EngineLoad, answers: EngineLoad) -> bool:
        """Return whether a prefill engine's queue is short enough for the split to pay off."""
        queued = prefill.prefill_tokens - answers.prefill_tokens
        longest = MAX_QUEUED_IN_PROMPTS * request.message.num_tokens
        return queued <= max(MAX_QUEUED * self._min_tokens, longest)


def draws_one_token(request: RoutedRequest) -> bool:
    """Return whether the request ends with the first token sampled after its prompt.

    The engine that computes the prompt answers it: a beam search step, or prompt scores.
    """
    return request.message.sampling.max_tokens - len(request.output_token_ids) == 1


def _are_compatible(one: Route, other: Route) -> bool:
    """Return whether two engines can read each other's blocks, according to their setups."""
    first, second = one.entry.setup, other.entry.setup
    return (
        first is not None
        and second is not None
        and bool(first.kv_address)
        and (first.model_fingerprint, first.kv_cache_dtype, first.block_size)
        == (second.model_fingerprint, second.kv_cache_dtype, second.block_size)
    )


def prefill_of(message: AddRequest) -> AddRequest:
    """Return the message for a prefill engine: compute the tokens and offer their blocks.

    It samples one token, which is discarded: the answering engine samples it again.
    """
    sampling = SamplingParams(
        max_tokens=len(message.output_token_ids) + 1, seed=0, temperature=0.0, ignore_eos=True
    )
    return msgspec.structs.replace(message, sampling=sampling, offers_blocks=True)


def answer_of(message: AddRequest, prefilled_by: Route | None) -> AddRequest:
    """Return the message for the answering engine, with the KV source unless that is gone."""
    setup = None if prefilled_by is None else prefilled_by.entry.setup
    if prefilled_by is None or setup is None:
        return message
    source = KvSource(setup.kv_address, prefilled_by.entry.incarnation)
    return msgspec.structs.replace(message, kv_source=source)
