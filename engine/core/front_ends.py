"""An engine's front ends: counts of received requests, and pending messages to each."""

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
    """Messages to send after a step: its outputs, and answers to events handled before it."""

    outputs: Outputs
    """By front end; empty if only the stats have changed."""
    utility_results: list[tuple[int, UtilityResult]]
    """With the front end that called."""
    stats: EngineStats
    exclusive_changes: bool = False
    """The next step changes which request runs alone: notify all front ends before it."""
    blocks: Sequence[tuple[int, KvBlocks]] = ()
    """Changes of KV blocks, with the front end that requested them."""


class UrgentStats(NamedTuple):
    """Fields of the stats that all front ends have to be sent immediately when they change."""

    halted: bool = False
    hands_over: bool = False
    exclusive_request: int = 0


@dataclass(slots=True)
class _FrontEnd:
    """One front-end process, and counts of what was received from it."""

    incarnation: int
    present: bool = True
    requests: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    images: ImageWindow = field(default_factory=lambda: ImageWindow(IMAGE_WINDOW_BYTES))
    sampling: SamplingParams | None = None
    """Of its newest request, if any of `_LISTS` is set."""


class FrontEnds:
    """All front ends that an engine has seen, by index, and their pending messages.

    A front end that left keeps its counts, since the same process may reconnect, and counts only
    grow.
    """

    def __init__(self) -> None:
        self.reported = UrgentStats()
        """State last sent to all front ends."""
        self.results: list[tuple[int, UtilityResult]] = []
        """Answers to operator calls, with the front end that called."""
        self.block_requests: dict[int, int] = {}
        """Front ends that wait for changes of KV blocks, with the newest change they know."""
        self.blocks: list[tuple[int, KvBlocks]] = []
        """Answers to them."""
        self._entries: dict[int, _FrontEnd] = {}
        self._outputs: Outputs = {}

    # -- presence --------------------------------------------------------------------------------

    @property
    def any_present(self) -> bool:
        """Whether any connected front end could send requests."""
        return any(entry.present for entry in self._entries.values())

    def is_present(self, index: int) -> bool:
        """Return whether a front end is connected."""
        entry = self._entries.get(index)
        return entry is not None and entry.present

    def joined(self, index: int, incarnation: int) -> bool:
        """Record a connected front end; return whether it replaces an earlier process."""
        known = self._entries.get(index)
        if known is not None and known.incarnation == incarnation:
            known.present = True
            return False
        self._entries[index] = _FrontEnd(incarnation)
        self._drop(index)
        return known is not None

    def left(self, index: int) -> bool:
        """Record that a front end has left; return whether it was known."""
        known = self._entries.get(index)
        if known is None:
            return False
        known.present, known.sampling = False, None
        self._drop(index)
        return True

    def count_request(self, message: AddRequest) -> None:
        """Count a request of a connected front end."""
        entry = self._entries[message.front_end]
        entry.requests += 1
        entry.prompt_tokens += message.num_tokens

    def restored(self, message: AddRequest) -> AddRequest | None:
        """Return a connected front end's request with its omitted images restored.

        None if they are missing because an earlier message was lost. The request is then not
        counted as received; the front end notices that and resends it with all images.

        Consecutive sequences of one request each carry all parameters, so that each can move to
        another engine by itself. Their long lists are deduplicated here.
        """
        entry, sampling = self._entries[message.front_end], message.sampling
        before, entry.sampling = entry.sampling, None
        # Written out, since this runs for every request.
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
            return entry.images.restore_held(message)
        except KeyError:
            return None

    def received(self) -> list[Received]:
        """Return the counts of connected front ends."""
        return [
            Received(index, entry.incarnation, entry.requests, entry.prompt_tokens, entry.outputs)
            for index, entry in self._entries.items()
            if entry.present
        ]

    # -- pending messages ------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        """Whether there are pending outputs or answers."""
        return bool(self._outputs or self.results or self.blocks)

    def collect(self, outputs: Outputs) -> None:
        """Add all outputs of a step, except for those without a recipient."""
        outputs.pop(FLEET, None)
        if not self._outputs:
            self._outputs = outputs
            return
        for front_end, new in outputs.items():
            self._outputs.setdefault(front_end, []).extend(new)

    def address(self, front_end: int) -> list[RequestOutput]:
        """Return the pending outputs of a front end, which gets a message even if there are
        none."""
        return self._outputs.setdefault(front_end, [])

    def hand_over(
        self, urgent: UrgentStats, stats: Callable[[], EngineStats], *, exclusive_changes: bool
    ) -> CoreStep:
        """Return all pending messages; every front end gets one if `urgent` has changed.

        Args:
            stats: called once the outputs are counted.
            exclusive_changes: see `CoreStep`.
        """
        if urgent != self.reported:
            self.reported = urgent
            for index, entry in self._entries.items():
                if entry.present:
                    self.address(index)
        outputs, results, blocks = self._outputs, self.results, self.blocks
        self._outputs, self.results, self.blocks = {}, [], []
        for index in outputs:
            self._entries[index].outputs += 1
        return CoreStep(outputs, results, stats(), exclusive_changes, blocks)

    def _drop(self, index: int) -> None:
        """Drop messages to a process that has left."""
        self._outputs.pop(index, None)
        self.block_requests.pop(index, None)
        self.blocks = [entry for entry in self.blocks if entry[0] != index]
        self.results = [entry for entry in self.results if entry[0] != index]
