"""The front ends that an engine has: what came from each, and what each is to be sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.core.halting import FLEET
from engine.scheduler.outputs import Outputs
from engine.shared.image_window import IMAGE_WINDOW_BYTES, ImageWindow
from engine.shared.messages import (
    AddRequest,
    EngineStats,
    KvBlocks,
    Received,
    RequestOutput,
    SamplingParams,
    UtilityResult,
)

_LISTS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "grammar")


class CoreStep(NamedTuple):
    """What goes out after a step: its outputs, and answers to messages handled before it."""

    outputs: Outputs
    """By front end; empty where only the stats are news."""
    utility_results: list[tuple[int, UtilityResult]]
    """With the front end that asked."""
    stats: EngineStats
    changes_alone: bool = False
    """The next step changes which request runs alone: all have to be told before it."""
    blocks: Sequence[tuple[int, KvBlocks]] = ()
    """Which KV blocks there are, with the front end that asked."""


class News(NamedTuple):
    """What all front ends have to know at once when it changes: fields of the stats."""

    halted: bool = False
    hands_over: bool = False
    alone: int = 0


@dataclass(slots=True)
class _FrontEnd:
    """One front-end process, and what was received from it."""

    incarnation: int
    present: bool = True
    requests: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    images: ImageWindow = field(default_factory=lambda: ImageWindow(IMAGE_WINDOW_BYTES))
    sampling: SamplingParams | None = None
    """Of its newest request, if that has any of `_LISTS`."""


class FrontEnds:
    """All front ends that an engine has met, by index, and what has not been handed over to them.

    Counts of a front end that left stay: the same process may turn out to be alive, and counts
    only grow.
    """

    def __init__(self) -> None:
        self.told = News()
        """What all front ends know."""
        self.results: list[tuple[int, UtilityResult]] = []
        """Answers to operators' calls, with the front end that asked."""
        self.wanted_blocks: dict[int, int] = {}
        """The newest change of KV blocks that each front end knows which waits for more."""
        self._blocks: list[tuple[int, KvBlocks]] = []
        self._entries: dict[int, _FrontEnd] = {}
        self._outputs: Outputs = {}

    # -- who is there ----------------------------------------------------------------------------

    @property
    def any_present(self) -> bool:
        """Whether anybody is there who could send requests."""
        return any(entry.present for entry in self._entries.values())

    def is_present(self, index: int) -> bool:
        """Return whether a front end is there to take answers."""
        entry = self._entries.get(index)
        return entry is not None and entry.present

    def joined(self, index: int, incarnation: int) -> bool:
        """A front end is there; return whether it replaces an earlier process."""
        known = self._entries.get(index)
        if known is not None and known.incarnation == incarnation:
            known.present = True
            return False
        self._entries[index] = _FrontEnd(incarnation)
        self._drop(index)
        return known is not None

    def left(self, index: int) -> bool:
        """Note that a front end is gone; return whether it was ever there."""
        known = self._entries.get(index)
        if known is None:
            return False
        known.present, known.sampling = False, None
        self._drop(index)
        return True

    def count_request(self, message: AddRequest) -> None:
        """Count a request of a front end that is there."""
        entry = self._entries[message.front_end]
        entry.requests += 1
        entry.prompt_tokens += message.num_tokens

    def restored(self, message: AddRequest) -> AddRequest | None:
        """Return a request of a front end that is there with the images that it leaves out.

        None if they are not here: an earlier message was lost. The request does not count as
        received then, and the front end, which notices that, sends it again with all images.

        Sequences of one request come one after the other, each with all of its parameters, so that
        each can move to another engine by itself. Their long lists are held once.
        """
        entry, sampling = self._entries[message.front_end], message.sampling
        before, entry.sampling = entry.sampling, None
        # Spelled out, as this is asked for every request.
        if (
            sampling.stop_token_ids
            or sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_words
            or sampling.grammar
        ):
            if before is not None:
                equal = [
                    name for name in _LISTS if getattr(sampling, name) == getattr(before, name)
                ]
                known = {name: getattr(before, name) for name in equal}
                sampling = msgspec.structs.replace(sampling, **known)
                message = msgspec.structs.replace(message, sampling=sampling)
            entry.sampling = sampling
        if not message.encoder_inputs:
            return message
        try:
            return entry.images.with_held(message)
        except KeyError:
            return None

    def received(self) -> list[Received]:
        """Return the counts of those that are there."""
        return [
            Received(index, entry.incarnation, entry.requests, entry.prompt_tokens, entry.outputs)
            for index, entry in self._entries.items()
            if entry.present
        ]

    # -- what they are to be sent ----------------------------------------------------------------

    @property
    def has_mail(self) -> bool:
        """Whether there are outputs or answers."""
        return bool(self._outputs or self.results or self._blocks)

    def collect(self, outputs: Outputs) -> None:
        """Take all outputs of a step, but those that nobody waits for."""
        outputs.pop(FLEET, None)
        if not self._outputs:
            self._outputs = outputs
            return
        for front_end, new in outputs.items():
            self._outputs.setdefault(front_end, []).extend(new)

    def address(self, front_end: int) -> list[RequestOutput]:
        """Return the outputs for a front end, which gets a message even if there are none."""
        return self._outputs.setdefault(front_end, [])

    def want_blocks(self, front_end: int, after: int) -> None:
        """A front end waits for changes of KV blocks after this one, if it is there."""
        if self.is_present(front_end):
            self.wanted_blocks[front_end] = after

    def tell_blocks(self, front_end: int, blocks: KvBlocks) -> None:
        """Answer a front end that waits for changes of KV blocks."""
        del self.wanted_blocks[front_end]
        self._blocks.append((front_end, blocks))

    def hand_over(
        self, news: News, stats: Callable[[], EngineStats], *, changes_alone: bool
    ) -> CoreStep:
        """Return all there is to send; if there is news, every front end gets a message.

        Args:
            stats: taken once the outputs are counted.
            changes_alone: see `CoreStep`.
        """
        if news != self.told:
            self.told = news
            for index, entry in self._entries.items():
                if entry.present:
                    self.address(index)
        outputs, results, blocks = self._outputs, self.results, self._blocks
        self._outputs, self.results, self._blocks = {}, [], []
        for index in outputs:
            self._entries[index].outputs += 1
        return CoreStep(outputs, results, stats(), changes_alone, blocks)

    def _drop(self, index: int) -> None:
        """Forget what was to be sent to a process that has gone."""
        self._outputs.pop(index, None)
        self.wanted_blocks.pop(index, None)
        self._blocks = [entry for entry in self._blocks if entry[0] != index]
        self.results = [entry for entry in self.results if entry[0] != index]
