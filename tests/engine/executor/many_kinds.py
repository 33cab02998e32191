"""Requests of all kinds, served concurrently by one engine, alone or in a group."""

import random
from typing import Any, TypeAlias

from engine.batch.executor import Executor
from engine.core.engine_core import EngineCore
from engine.distributed.engines import EngineGroup
from engine.grammar.masks import GrammarTable
from engine.shared.config import EngineConfig
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    EngineCounters,
    RegexGrammar,
    SamplingParams,
)

WORDS = RegexGrammar("[a-z]{2,9}( [a-z]{2,9}){2,5}")
CHORUS = RegexGrammar("(la, ){5}")
"""Repeats what it has said, so that drafts from n-grams are right, of a random model too."""
Served: TypeAlias = tuple[
    dict[int, list[int]], dict[int, str], dict[int, list[tuple[int, list[int]]]]
]
"""Tokens, finish reasons and logprobs (ranks and most likely tokens) of each request."""


def requests(vocab: int, *, grammars: bool = False, longest: int = 16) -> list[AddRequest]:
    """Return requests of all kinds, some with common prefixes; together they exceed the KV cache.

    Their answers have up to `longest` tokens.
    """
    rng = random.Random(5)
    beginning = [rng.randrange(vocab) for _ in range(33)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "prompt_logprobs": 1, "min_tokens": 5},
        {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.3},
        {"temperature": 0.0, "grammar": WORDS if grammars else None},
    ]
    made = []
    for id in range(12):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
        kind = kinds[id % len(kinds)]
        sampling = SamplingParams(max_tokens=rng.randint(6, longest), seed=id, **kind)
        made.append(
            AddRequest(id, f"request-{id}", 0, 0, beginning * (id % 3 == 0) + prompt, sampling)
        )
    if grammars:
        sampling = SamplingParams(max_tokens=40, seed=0, temperature=0.0, grammar=CHORUS)
        made.insert(0, AddRequest(12, "chorus", 0, 0, [1, 2, 3], sampling))
    return made


def serve(
    executor: Executor,
    config: EngineConfig,
    made: list[AddRequest],
    group: EngineGroup | None = None,
) -> tuple[Served, EngineCounters]:
    """Serve all, two more with each step; return their tokens, ends, logprobs, and preemptions.

    Engines of a group step together until all are idle.
    """
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    made = list(made)
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    logprobs: dict[int, list[tuple[int, list[int]]]] = {}
    number = in_flight = 0
    max_in_flight = 1 + config.scheduler.steps_overlap
    while goes_on(bool(made) or core.has_requests, group):
        for message in made[:2]:
            if message.sampling.grammar is not None:
                assert isinstance(executor.grammars, GrammarTable)
                executor.grammars.request(message.sampling.grammar).wait()
            core.handle(message)
        del made[:2]
        if group is None:
            step = core.step()
        else:
            core.steps.launch_together(number, ())
            in_flight += 1
            number += 1
            if in_flight < max_in_flight:
                continue
            step = core.land_together()
            in_flight -= 1
        for output in step.outputs.get(0, []):
            if output.id in ends:
                continue
            tokens.setdefault(output.id, []).extend(output.token_ids)
            for entry in [*(output.prompt_logprobs or []), *(output.logprobs or [])]:
                logprobs.setdefault(output.id, []).append((entry.rank, entry.top_ids))
            if output.finish_reason is not None:
                ends[output.id] = output.finish_reason
            elif output.id == 7 and len(tokens[7]) >= 3:
                tokens[7] = tokens[7][:3]
                core.handle(AbortRequests([7]))
                ends[7] = "abort"
    for _ in range(in_flight):
        core.land_together()
    logprobs.pop(7, None)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    return (tokens, ends, logprobs), stats.counters


def goes_on(has_work: bool, group: EngineGroup | None) -> bool:
    """Whether a step is to be taken."""
    if group is None:
        return has_work
    return any(rank[0] for rank in group.all_gather_rows([has_work]).wait())
