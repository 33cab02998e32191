"""One sequence that a front end has in flight: what it is, and where it runs."""

from dataclasses import dataclass, field

import msgspec

from engine.shared.messages import AddRequest
from server.router.engine_times import EngineTimes
from server.router.route import Engine
from server.router.suspicion import Suspicion


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that the front end owns until it ends, on whichever engines it runs.

    Prompt, sampling parameters and every token so far stay here, so that another engine can go on
    where one has died.
    """

    message: AddRequest
    """What was asked for; its id is the one under which the request was sent last."""
    pinned_rank: int | None = None
    """The only engine that may run it; None: any may."""
    engine: Engine | None = None
    """The engine process that runs it; None: it waits for one."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens received so far, from all engines that ran it."""
    times: EngineTimes = field(default_factory=EngineTimes)
    suspicion: Suspicion = field(default_factory=Suspicion)
    waited_since: float | None = None
    """Since when it had waited for the engine that it was sent to last; None: not at all."""

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def rank(self) -> int:
        """Rank of the engine that runs it; -1 without one."""
        return -1 if self.engine is None else self.engine[0]

    def to_send(self, wave: int) -> AddRequest:
        """Return the request as an engine has to take it (over): with the tokens so far."""
        message = self.message
        if not self.output_token_ids:
            return message if message.wave == wave else msgspec.structs.replace(message, wave=wave)
        sampling = message.sampling
        if sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            message, wave=wave, sampling=sampling, output_token_ids=list(self.output_token_ids)
        )
