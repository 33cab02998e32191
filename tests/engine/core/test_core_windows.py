"""Engines with sliding-window layers generate the same tokens as without freeing blocks."""

import random
from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.executor import loading
from engine.executor.in_process import InProcessExecutor
from engine.models.cache_groups import CacheGroups
from engine.shared.config import (
    EngineConfig,
)
from engine.shared.messages import AbortRequests, AddRequest, SamplingParams
from tests.engine.configs import config_of
from tests.engine.fixtures import MakePrompt, SaveModel
from tests.engine.serving import request, serve

STREAMS = 100


def settings(directory: Path, num_blocks: int, drafts: int = 0) -> EngineConfig:
    return config_of(
        directory,
        model={"max_model_len": 256},
        cache={"num_kv_blocks": num_blocks, "block_size": 4},
        scheduler={
            "max_num_seqs": STREAMS,
            "max_num_batched_tokens": 512,
            "speculative_ngram": drafts,
            "max_slowdown": 0,  # what is scheduled depends on no clock
        },
        executor={"batch_invariant": True},
    )


def streams() -> list[AddRequest]:
    """Half of them share a prefix of up to 72 tokens with others."""
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
    """Run all streams, adding three per step and checking integrity; some are aborted."""
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    arrivals, tokens = streams(), {id: list[int]() for id in range(STREAMS)}
    aborted: set[int] = set()
    while arrivals or core.has_work:
        for arrival in arrivals[:3]:
            core.handle(arrival)
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


@pytest.mark.parametrize(
    ("name", "num_blocks", "drafts"),
    [("mistral-window", 900, 0), ("gemma3", 300, 3), ("cohere2", 300, 0)],
)
def test_freeing_window_blocks_changes_no_token_of_100_streams(
    name: str,
    num_blocks: int,
    drafts: int,
    checkpoint: SaveModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(name).directory
    tokens, core = served(settings(directory, num_blocks, drafts))
    assert core.stats().counters.prefix_cache_hits > 250
    monkeypatch.setattr(loading, "_cache_groups", lambda *_: CacheGroups())
    others, plain = served(settings(directory, 4_000, drafts))
    assert plain.stats().counters.preemptions == 0
    assert tokens == others


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("llama", False),
        ("deepseek3", True),
        ("smollm3", False),
        ("ministral3", True),
        ("mistral-window", False),
        ("gemma2", False),
        ("gemma3", True),
        ("gpt-oss", True),
        ("cohere2", False),
        ("qwen2-some-windows", True),
        ("llama4", False),
    ],
)
def test_chunked_cached_and_preempted_sequences_get_the_tokens_of_transformers(
    name: str, overlap: bool, checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    model, shared = checkpoint(name), prompt(60)
    prompts = [[*shared[: 60 - 4 * (id % 3)], *prompt(70)[id : id + 9 + id]] for id in range(12)]
    answers, stats = serve(
        model.directory,
        [request(id, each, temperature=0.0, max_tokens=40) for id, each in enumerate(prompts)],
        dtype="float32",
        # Where all layers slide, a sequence takes no more than its window.
        num_blocks=36 if name == "mistral-window" else 64,
        block_size=4,
        async_scheduling=overlap,
        max_slowdown=0,  # what is scheduled depends on no clock
    )
    assert stats.counters.prefix_cache_hits > 100
    assert stats.counters.preemptions
    assert stats.kv_usage == 0
    for given, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.greedy(given, 40, answer.tokens)


def after_8192_tokens(directory: Path, num_blocks: int) -> tuple[list[int], list[int], int]:
    """Serve a prompt of 8,192 tokens and 40 more.

    Returns:
        The tokens, the blocks in use after each step, and the total number of blocks.
    """
    config = config_of(
        directory,
        model={"max_model_len": 8240},
        cache={"num_kv_blocks": num_blocks, "block_size": 16},
        scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 512},
    )
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    prompt = [(7 * i + i * i % 11) % 256 for i in range(8192)]
    core.handle(request(0, prompt, max_tokens=40, temperature=0.0))
    tokens, used = list[int](), list[int]()
    while core.has_work:
        for output in core.step().outputs.get(0, []):
            tokens += output.token_ids
        used.append(round(core.stats().kv_usage * executor.info.num_kv_blocks))
    executor.shutdown()
    return tokens, used, executor.info.num_kv_blocks


def test_sliding_layers_use_only_blocks_of_their_window(
    checkpoint: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("gemma3-long").directory
    tokens, used, num_blocks = after_8192_tokens(directory, 182)
    assert num_blocks == 6 * 182
    # After the prompt the next token attends to what follows position 7680, from block 480 on.
    assert used[8192 // 512 - 1] == 512 + 5 * (512 - 480)
    # Each planned step allocates its blocks in advance, like prompt chunks.
    in_advance = 2 * (512 + 1)
    assert max(used) <= 515 + 5 * (-(-(511 + in_advance) // 16) + 1)
    monkeypatch.setattr(loading, "_cache_groups", lambda *_: CacheGroups())
    others, kept, _ = after_8192_tokens(directory, 515)
    assert tokens == others
    assert kept[8192 // 512 - 1] == 512  # each as large as six of the others
