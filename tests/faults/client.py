"""A client in virtual time: sends, retries while no engine can serve, reads, and disconnects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.executor.simulated import _token_logprob
from engine.shared.messages import AddRequest, RequestOutput
from server.router.generation_client import KillsEngines, NoEngineAvailable
from server.router.token_stream import ReaderTooSlow, RequestStream, merge
from tests.faults.front import Front
from tests.faults.oracle import VOCABULARY, answer
from tests.faults.plan import Ask

if TYPE_CHECKING:
    from tests.faults.world import World

RETRY_AFTER = 0.5


class Client:
    """Sends one request until it is answered; a front end that dies costs a new connection."""

    def __init__(self, world: World, ask: Ask) -> None:
        self.next_names = ask
        self.done = False
        self.attempts = 0
        """Number of front ends that accepted it."""
        self.error: str | None = None
        self.left = False
        self._world = world
        self._front: Front | None = None
        self._stream: RequestStream | None = None
        self._parts: list[RequestOutput] = []
        world.clock.at(ask.at, self._send)
        if ask.leaves_after is not None:
            world.clock.at(ask.at + ask.leaves_after, self._leave)

    def _send(self) -> None:
        if self.done:
            return
        fronts = [each for each in self._world.fronts.values() if each.alive and not each.stopped]
        if not fronts:
            self._world.clock.at(self._world.clock.now + RETRY_AFTER, self._send)
            return
        front = fronts[self._world.rng.randrange(len(fronts))]
        ask, now = self.next_names, self._world.clock.now
        try:
            stream = front.shell.submit(
                AddRequest(
                    id=0,
                    request_id=ask.name,
                    front_end=front.index,
                    wave=0,
                    prompt_token_ids=list(ask.prompt),
                    sampling=ask.sampling,
                    priority=ask.priority,
                    tenant=ask.tenant,
                    cache_root=ask.tenant.to_bytes(16) if ask.tenant else b"",
                ),
                ask.pinned_rank,
            )
        except NoEngineAvailable as error:
            if self._world.is_retired(ask.pinned_rank):
                self.error, self.done = str(error), True
                return
            self._world.clock.at(now + RETRY_AFTER, self._send)
            return
        self.attempts += 1
        self._front, self._stream, self._parts = front, stream, []
        self._read()

    def _read(self) -> None:
        """Read new outputs; poll again soon, or reconnect if the front end has died."""
        if self.done or self._front is None or self._stream is None:
            return
        if not self._front.alive:
            self._front = self._stream = None
            self._world.forget_assignments(self.next_names.name)
            self._send()
            return
        try:
            while taken := self._stream.unread.take():
                assert not self.has_ended, f"{self.next_names.name}: told more after its end"
                self._parts += [output for _, output in taken]
        except (NoEngineAvailable, KillsEngines, ReaderTooSlow) as error:
            self.error = str(error)
        if self.has_ended or self.error is not None:
            self.done = True
            self._stream.close()
            return
        self._world.clock.at(self._world.clock.now + 0.25, self._read)

    @property
    def has_ended(self) -> bool:
        """Whether it has received the end of its answer."""
        return bool(self._parts) and self._parts[-1].finish_reason is not None

    def _leave(self) -> None:
        if self.done:
            return
        self.done = self.left = True
        front, stream = self._front, self._stream
        if front is not None and stream is not None:
            front.call(stream.close)

    def check(self) -> None:
        """Compare the answer received with the expected one.

        Raises:
            AssertionError: they differ.
        """
        ask = self.next_names
        expected, reason = answer(ask.prompt, ask.sampling)
        told = merge(self._parts) if self._parts else RequestOutput(0, [])
        if self.left or self.error is not None or ask.is_poison:
            whole = expected[: len(told.token_ids)]
            assert told.token_ids == whole, f"{ask.name}: {told.token_ids}, not {whole}"
        else:
            assert (told.token_ids, told.finish_reason) == (expected, reason), (
                f"{ask.name}: {told.token_ids} {told.finish_reason} {told.error}, "
                f"not {expected} {reason}"
            )
        if told.finish_reason is None:
            return
        if ask.sampling.logprobs is not None:
            entries = [_token_logprob(t, ask.sampling.logprobs, VOCABULARY) for t in expected]
            assert told.logprobs == entries, f"{ask.name}: log probabilities differ"
        if ask.sampling.prompt_logprobs is not None:
            known = [
                _token_logprob(t, ask.sampling.prompt_logprobs, VOCABULARY) for t in ask.prompt[1:]
            ]
            assert (told.prompt_logprobs or []) == known, f"{ask.name}: prompt differs"
