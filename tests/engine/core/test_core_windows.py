"""Whole engines whose layers slide: tokens are those of an engine that frees no blocks."""

import random
from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.executor import in_process
from engine.executor.in_process import InProcessExecutor
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AbortRequests, AddRequest, SamplingParams
from tests.engine.fixtures import SaveModel

STREAMS = 200


def settings(directory: Path, num_blocks: int, guesses: int = 0) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", max_model_len=256, device="cpu"),
        cache=CacheConfig(num_kv_blocks=num_blocks, block_size=4),
        scheduler=SchedulerConfig(
            max_num_seqs=STREAMS, max_num_batched_tokens=512, speculative_ngram=guesses
        ),
        executor=ExecutorConfig(threads=1, batch_invariant=True),
    )


def streams() -> list[AddRequest]:
    """Half of them begin like others, with up to 72 tokens."""
    rng = random.Random(3)
    families = [[rng.randrange(200) for _ in range(72)] for _ in range(6)]
    requests = []
    for id in range(STREAMS):
        prompt = rng.choice(families)[: rng.randint(1, 72)] if id % 2 else []
        prompt = prompt + [rng.randrange(200) for _ in range(rng.randint(1, 50))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 30), seed=id, ignore_eos=True)
        requests.append(AddRequest(id, str(id), 0, 0, prompt, sampling))
    return requests


def served(config: EngineConfig) -> tuple[dict[int, list[int]], EngineCore]:
    """Run all streams, three a step, with integrity checked in each; some are aborted."""
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    arrivals, tokens = streams(), {id: list[int]() for id in range(STREAMS)}
    aborted: set[int] = set()
    while arrivals or core.has_work:
        for request in arrivals[:3]:
            core.handle(request)
        del arrivals[:3]
        for output in core.step().outputs.get(0, []):
            if output.id in aborted:
                continue
            tokens[output.id] += output.token_ids
            if output.id % 10 == 7 and output.finish_reason is None:
                core.handle(AbortRequests([output.id]))
                aborted.add(output.id)
                tokens[output.id] = tokens[output.id][:1]
        core._scheduler.check_integrity()
    executor.shutdown()
    assert core.stats().kv_usage == 0
    return tokens, core


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("name", ["mistral-window"])
def test_two_hundred_streams_get_the_tokens_of_an_engine_that_frees_nothing(
    name: str, guesses: int, checkpoint: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(name).directory
    tokens, core = served(settings(directory, 900, guesses))
    assert core.stats().counters.prefix_cache_hits > 1000
    monkeypatch.setattr(in_process, "_cache_windows", lambda *_: (None,))
    others, plain = served(settings(directory, 20_000, guesses))
    assert plain.stats().counters.preemptions == 0
    assert tokens == others
