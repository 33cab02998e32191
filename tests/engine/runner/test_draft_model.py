"""A draft model does not change a model's output, whatever it proposes."""

from typing import Any

import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.models.attention.kv_format import PlainKv
from engine.models.hf_config import read_spec
from engine.runner.kv_memory import bytes_per_block
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
)
from engine.shared.messages import AddRequest, EngineStats
from tests.engine.configs import config_of
from tests.engine.fixtures import SaveModel
from tests.engine.serving import (
    SOME_TEXT,
    Answer,
    assert_alike,
    every_kind,
    request,
    serve,
)


def serve_all(**options: Any) -> tuple[list[Answer], EngineStats]:
    return serve(BUNDLED_MODEL, every_kind(), dtype="float32", max_slowdown=0, **options)


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    """The bundled model's answers without drafts."""
    return serve_all()[0]


def test_a_draft_model_that_is_the_model_itself_is_always_right(plain: list[Answer]) -> None:
    drafted, stats = serve_all(
        num_blocks=40, speculative_model=str(BUNDLED_MODEL), num_speculative_tokens=5
    )
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    counters = stats.counters
    assert counters.spec_draft_tokens == counters.spec_accepted_tokens > 200
    assert counters.spec_accepted_at[0] == counters.spec_drafts
    assert counters.preemptions > 0


@pytest.mark.parametrize(
    ("served", "drafting"),
    [
        ("llama", "deepseek3"),
        ("mistral-window", "llama"),
    ],
)
def test_draft_model_can_be_of_other_family(
    served: str, drafting: str, checkpoint: SaveModel
) -> None:
    target, other = checkpoint(served).directory, checkpoint(drafting).directory
    requests = [
        request(id, SOME_TEXT[: 9 + 7 * id], temperature=id % 2 * 0.8, max_tokens=30)
        for id in range(5)
    ]
    plain, _ = serve(target, requests, dtype="float32")
    drafted, stats = serve(target, requests, dtype="float32", speculative_model=str(other))
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafted]
    assert stats.counters.spec_draft_tokens > 0


def test_draft_model_uses_blocks_of_layers_without_window(checkpoint: SaveModel) -> None:
    """A model with windows drafts for itself: so it is right as long as it finds its own keys."""
    directory = checkpoint("gemma3").directory
    prompt = SOME_TEXT * 2
    requests = [
        request(id, [*prompt[: 20 + 30 * (id % 3)], 70 + id], temperature=id % 2 * 0.8)
        for id in range(9)
    ]
    plain, _ = serve(directory, requests, dtype="float32")
    drafted, stats = serve(
        directory,
        requests,
        dtype="float32",
        num_blocks=24,
        speculative_model=str(directory),
        max_slowdown=0,
    )
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafted]
    counters = stats.counters
    assert counters.prefix_cache_hits > 0
    assert counters.preemptions > 0
    assert counters.spec_accepted_tokens > 0.9 * counters.spec_draft_tokens > 0


@pytest.mark.parametrize(
    ("served", "windows"),
    [("gemma3", (20, 20, None)), ("mistral-window", (None,)), ("llama", (None,))],
)
def test_windows_free_blocks_that_other_groups_keep(
    served: str, windows: tuple[int | None, ...], checkpoint: SaveModel
) -> None:
    drafting = str(checkpoint("llama").directory)
    drafts = {"speculative_model": drafting}
    config = config_of(checkpoint(served).directory, model={"max_model_len": 256}, scheduler=drafts)
    executor = InProcessExecutor(config)
    assert executor.info.cache_windows == windows
    executor.shutdown()


def test_draft_model_can_be_a_quantized_copy(plain: list[Answer]) -> None:
    drafted, stats = serve_all(
        speculative_model=str(BUNDLED_MODEL), speculative_model_quantization="int8"
    )
    assert_alike(plain, drafted)
    counters = stats.counters
    assert counters.spec_draft_tokens / 2 < counters.spec_accepted_tokens
    assert counters.spec_accepted_tokens < counters.spec_draft_tokens


def test_draft_model_finds_cached_prefixes() -> None:
    """Sequences with a cached prefix are drafted as well as the original one."""
    prompt = SOME_TEXT * 2
    requests = [request(id, [*prompt, 70 + id], max_tokens=8, temperature=0) for id in range(20)]
    answers, stats = serve(
        BUNDLED_MODEL,
        requests,
        dtype="float32",
        speculative_model=str(BUNDLED_MODEL),
        max_slowdown=0,
    )
    counters = stats.counters
    assert counters.prefix_cache_hits >= 80 * 12
    assert counters.spec_draft_tokens == counters.spec_accepted_tokens > 0
    alone, _ = serve(BUNDLED_MODEL, requests[17:18], dtype="float32")
    assert alone[0].tokens == answers[17].tokens


def settings(cache: dict[str, Any], max_drafting: int | None = None) -> EngineConfig:
    return config_of(
        BUNDLED_MODEL,
        cache=cache,
        scheduler={
            "max_num_seqs": 4,
            "max_slowdown": 0,
            "speculative_model": str(BUNDLED_MODEL),
            "speculative_row_price": 0,
            "speculative_disable_by_batch_size": max_drafting,
        },
    )


def answers(core: EngineCore, *requests: AddRequest) -> dict[int, list[int]]:
    """Return an engine's answers to simultaneous requests, by request id."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    for each in requests:
        core.handle(each)
    while core.has_work:
        for output in core.step().outputs.get(0, []):
            tokens[output.id] += output.token_ids
    return tokens


def test_drafts_after_skipped_ones_are_as_accurate(plain: list[Answer]) -> None:
    drafted, stats = serve_all(
        num_blocks=40,
        speculative_model=str(BUNDLED_MODEL),
        num_speculative_tokens=3,
        speculative_disable_by_batch_size=6,
    )
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    counters = stats.counters
    assert counters.spec_skipped > 50
    assert counters.spec_draft_tokens == counters.spec_accepted_tokens > 50
    assert counters.preemptions > 0


def test_blocks_filled_during_skipped_drafts_can_be_used() -> None:
    config = settings({"num_kv_blocks": 300, "block_size": 4}, max_drafting=1)
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    prompts = {id: SOME_TEXT[id : id + 12] for id in (1, 2)}
    written = answers(core, *(request(id, prompts[id], max_tokens=41) for id in (1, 2)))
    before = core.stats().counters.snapshot()
    assert before.spec_skipped > 70
    answers(core, request(3, prompts[1] + written[1], max_tokens=20))
    counters = core.stats().counters
    assert counters.prefix_cache_hits - before.prefix_cache_hits == 52
    drafted = counters.spec_draft_tokens - before.spec_draft_tokens
    assert drafted == counters.spec_accepted_tokens - before.spec_accepted_tokens > 10
    executor.shutdown()


def test_cache_memory_includes_blocks_of_both_models() -> None:
    spec = read_spec(BUNDLED_MODEL)
    executor = InProcessExecutor(
        settings({"num_kv_blocks": None, "block_size": 16, "kv_cache_memory_bytes": 16 << 20})
    )
    block = bytes_per_block(spec, 16, PlainKv(torch.float32))
    assert executor.info.num_kv_blocks == (16 << 20) // (2 * block)
    executor.shutdown()
