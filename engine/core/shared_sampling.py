"""Sampling parameters that sequences of one request have in common, held once.

A front end sends the sequences of a request one after the other, each with all of its parameters:
so each can move to another engine, or be sent again, by itself. Their long lists would be held
as often as there are sequences.
"""

import msgspec

from engine.shared.messages import AddRequest, SamplingParams

_LISTS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "grammar")


class SharedSampling:
    """Replaces lists by equal ones of the request before, for each front end."""

    def __init__(self) -> None:
        self._newest: dict[int, SamplingParams] = {}

    def shared(self, message: AddRequest) -> AddRequest:
        """Return an equal message with the lists of the one before where these are equal."""
        sampling = message.sampling
        if not _has_lists(sampling):
            self._newest.pop(message.front_end, None)
            return message
        before = self._newest.get(message.front_end)
        if before is not None:
            known = {
                name: getattr(before, name)
                for name in _LISTS
                if getattr(sampling, name) == getattr(before, name)
            }
            sampling = msgspec.structs.replace(sampling, **known)
            message = msgspec.structs.replace(message, sampling=sampling)
        self._newest[message.front_end] = sampling
        return message

    def forget(self, front_end: int) -> None:
        """A front end has gone."""
        self._newest.pop(front_end, None)


def _has_lists(sampling: SamplingParams) -> bool:
    """Whether any of `_LISTS` is there; spelled out, as this is asked for every request."""
    return bool(
        sampling.stop_token_ids
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.grammar
    )
