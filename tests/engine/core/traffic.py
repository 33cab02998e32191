"""Random requests for an engine core, some of them aborted, and their results."""

import random
from typing import NamedTuple

from engine.core.engine_core import EngineCore
from engine.shared.messages import AbortRequests, AddRequest, SamplingParams


class Served(NamedTuple):
    """Results of all requests."""

    tokens: dict[int, list[int]]
    ends: dict[int, str | None]
    """Finish reasons; `abort` for requests aborted after enough tokens."""
    preemptions: int


def request(id: int, length: int, max_tokens: int, *, ignore_eos: bool = True) -> AddRequest:
    """Return a seeded request; all odd ids share a prompt prefix, and so do all even ones."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=id, ignore_eos=ignore_eos)
    prompt = [1 + (id % 2 + i) % 39 for i in range(length)]
    return AddRequest(id, f"request-{id}", 0, 0, prompt, sampling)


def serve(core: EngineCore, seed: int, num_requests: int) -> Served:
    """Run random traffic in which some requests are aborted once they have enough tokens."""
    rng = random.Random(seed)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str | None] = {}
    arrivals = [request(id, rng.randint(1, 40), rng.randint(1, 24), ignore_eos=rng.random() < 0.7)
                for id in range(num_requests)]  # fmt: skip
    enough = {id: rng.randint(1, 12) for id in range(0, num_requests, 5)}
    while arrivals or core.has_work:
        for message in arrivals[:2]:
            tokens[message.id] = []
            core.handle(message)
        del arrivals[:2]
        for output in core.step().outputs.get(0, []):
            if output.id in ends:
                continue
            tokens[output.id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.id] = output.finish_reason
            elif len(tokens[output.id]) >= enough.get(output.id, 1000):
                # Accepted drafts can add several tokens at once.
                tokens[output.id] = tokens[output.id][: enough[output.id]]
                core.handle(AbortRequests([output.id]))
                ends[output.id] = "abort"
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.queued_prefill_tokens) == (
        0, 0, 0.0, 0
    )  # fmt: skip
    return Served(tokens, ends, stats.counters.preemptions)
