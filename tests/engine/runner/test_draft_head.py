"""A draft head's proposals match its formula and do not change the output."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.executor.in_process import InProcessExecutor
from engine.models.attention.kv_format import PlainKv
from engine.runner.kv_memory import bytes_per_block
from engine.shared.config import (
    BUNDLED_MODEL,
    EngineConfig,
)
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    RegexGrammar,
    SamplingParams,
)
from tests.engine.configs import config_of
from tests.engine.draft_heads import (
    Eagle3Reference,
    Proposals,
    Reference,
    greedy_requests,
    note_proposals,
    save_eagle3,
)
from tests.engine.fixtures import SaveModel
from tests.engine.serving import (
    SOME_TEXT,
    Answer,
    assert_alike,
    every_kind,
    request,
    serve,
)
from tests.engine.tiny_models import Checkpoint


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return note_proposals(monkeypatch)


BIAS = {70: 8.0, 71: 8.0}
"""Makes these tokens likely to models and heads, so that some drafts are right."""


@pytest.fixture(scope="module")
def target(checkpoint: SaveModel) -> Checkpoint:
    return checkpoint("llama-deep")


@pytest.fixture(scope="module")
def head(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Reference:
    return save_eagle3(target, tmp_path_factory.mktemp("head"), layer_ids=[1, 2, 3])


def drafted(
    model: Checkpoint | Path, head: Reference, requests: list[AddRequest], **options: Any
) -> tuple[list[Answer], EngineStats]:
    directory = model if isinstance(model, Path) else model.directory
    return serve(
        directory, requests, dtype="float32", max_slowdown=0,
        speculative_model=str(head.directory), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("drafts", "num_blocks"), [(1, 300), (5, 40)])
def test_proposals_equal_formula_for_chunks_prefixes_and_batches(
    target: Checkpoint,
    head: Eagle3Reference,
    proposals: Proposals,
    num_blocks: int,
    drafts: int,
) -> None:
    requests = [
        AddRequest(id, str(id), 0, 0, each.prompt_token_ids, each.sampling)
        for id, each in enumerate(greedy_requests(BIAS) * 2)
    ]
    plain, _ = serve(target.directory, requests, dtype="float32")
    answers, stats = drafted(
        target, head, requests, num_blocks=num_blocks, num_speculative_tokens=drafts
    )
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    proposals.check(head, BIAS)
    counters = stats.counters
    assert counters.prefix_cache_hits > 0
    assert (counters.preemptions > 0) == (num_blocks == 40)
    assert 0 < counters.spec_accepted_tokens < counters.spec_draft_tokens
    assert len(counters.spec_accepted_at) == drafts


@pytest.mark.parametrize(
    "form",
    [
        {"prefix": "layers.0."},
        {"before_residual": True, "as_speculator": True, "layer_ids": [2, 3, 4]},
        {"draft_tokens": [3, 60, 61, 62, 66, 70, 99, 200, 255]},
    ],
    ids=str,
)
def test_logits_equal_formula_in_every_published_format(
    target: Checkpoint, tmp_path: Path, proposals: Proposals, form: dict[str, Any]
) -> None:
    made = save_eagle3(target, tmp_path, seed=3, **{"layer_ids": [1, 2, 3], **form})
    answers, _ = drafted(
        target, made, [request(1, SOME_TEXT, temperature=0.0)], num_speculative_tokens=1
    )
    proposals.check(made)
    assert len(proposals.logits) == len(proposals.made) > 30
    for (after, _), logits in zip(proposals.made, proposals.logits, strict=True):
        expected = made.drafts(after, 1)[1]
        assert (logits[0, made.tokens] - expected[made.tokens]).abs().max() < 1e-3
        assert int((logits[0] > -1e29).sum()) == len(made.tokens)
    assert len(answers[0].tokens) == 60


@pytest.mark.parametrize(("batch_invariant", "num_blocks"), [(False, 40), (True, 200)])
def test_drafting_changes_no_token_with_any_sampling(
    target: Checkpoint, head: Eagle3Reference, num_blocks: int, batch_invariant: bool
) -> None:
    plain, _ = serve(
        target.directory, every_kind(), dtype="float32", batch_invariant=batch_invariant
    )
    answers, stats = drafted(
        target, head, every_kind(), num_blocks=num_blocks, batch_invariant=batch_invariant
    )
    assert_alike(plain, answers)
    counters = stats.counters
    assert 0 < counters.spec_accepted_tokens < counters.spec_draft_tokens
    assert (counters.preemptions > 0) == (num_blocks == 40)


@pytest.mark.parametrize("name", ["deepseek3", "gpt-oss"])
def test_eagle3_head_works_with_other_families(
    name: str, checkpoint: SaveModel, tmp_path: Path, proposals: Proposals
) -> None:
    """With windows, latents, sinks and experts."""
    model = checkpoint(name)
    made = save_eagle3(model, tmp_path, layer_ids=[0, 1, 2])
    requests = [
        request(id, SOME_TEXT[: 9 + 7 * id], temperature=id % 2 * 0.8, max_tokens=30)
        for id in range(5)
    ]
    plain, _ = serve(model.directory, requests, dtype="float32")
    answers, _ = drafted(model, made, requests)
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in answers]
    assert proposals.made


@pytest.mark.parametrize("options", [{}, {"speculative_model_quantization": "int8"}], ids=str)
def test_head_is_accurate_in_16_and_8_bits(
    target: Checkpoint, head: Eagle3Reference, options: dict[str, Any]
) -> None:
    answers, stats = serve(
        target.directory, greedy_requests(BIAS), dtype="bfloat16", max_slowdown=0,
        speculative_model=str(head.directory), **options,
    )  # fmt: skip
    assert all(len(answer.tokens) == 25 for answer in answers)
    assert stats.counters.spec_accepted_tokens > 0


def test_moved_request_continues_with_same_tokens(
    target: Checkpoint, head: Eagle3Reference, proposals: Proposals
) -> None:
    prompt = SOME_TEXT[:20] * 2
    (whole,), _ = serve(target.directory, [request(3, prompt)], dtype="float32")
    moved = AddRequest(
        3, "3", 0, 0, prompt, request(3, prompt).sampling, output_token_ids=whole.tokens[:23]
    )
    (rest,), _ = drafted(target, head, [moved])
    assert whole.tokens[:23] + rest.tokens == whole.tokens
    assert proposals.made[0].after[: len(prompt)] == prompt


def settings(
    model: Path, head: Reference, cache: dict[str, Any], **scheduling: Any
) -> EngineConfig:
    drafting = {"speculative_model": str(head.directory), "speculative_row_price": 0}
    return config_of(
        model,
        model={"max_model_len": 256},
        cache=cache,
        scheduler={"max_num_seqs": 4, **drafting, **scheduling},
    )


@pytest.fixture
def core(target: Checkpoint, head: Eagle3Reference) -> Iterator[EngineCore]:
    config = settings(target.directory, head, {"num_kv_blocks": 100})
    executor = InProcessExecutor(config)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    yield core
    executor.shutdown()


def tokens_of(core: EngineCore, id: int) -> list[int]:
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().outputs.get(0, []):
            if output.id == id:
                tokens += output.token_ids
    return tokens


def test_aborted_requests_do_not_affect_others(
    core: EngineCore, target: Checkpoint, head: Eagle3Reference, proposals: Proposals
) -> None:
    """Their slots and blocks can be reused at any moment."""
    requests = greedy_requests(BIAS)
    for id, each in enumerate(requests * 3):
        core.handle(AddRequest(id, str(id), 0, 0, each.prompt_token_ids, each.sampling))
        for _ in range(id % 4 + 1):
            core.step()
        if id % 3:
            core.handle(AbortRequests([id - id % 2]))
    core.handle(AddRequest(99, "99", 0, 0, requests[5].prompt_token_ids, requests[5].sampling))
    (plain,), _ = serve(target.directory, requests[5:6], dtype="float32")
    assert tokens_of(core, 99) == plain.tokens
    proposals.check(head, BIAS)


def test_outputs_follow_their_grammars(tmp_path: Path) -> None:
    served = AutoConfig.from_pretrained(BUNDLED_MODEL)
    bundled = Checkpoint(BUNDLED_MODEL, SimpleNamespace(config=served))
    save_eagle3(bundled, tmp_path, layer_ids=[1, 2, 4])
    texts = []
    both: tuple[dict[str, Any], ...] = ({}, {"speculative_model": str(tmp_path)})
    for scheduling in both:
        config = config_of(BUNDLED_MODEL, model={"max_model_len": 128}, scheduler=scheduling)
        executor = InProcessExecutor(config)
        core = EngineCore(config, executor, rank=0, incarnation=1)
        core.front_end_joined(0, 1)
        tokens: dict[int, list[int]] = {}
        for id in range(6):
            grammar = RegexGrammar("[0-9]{3}(-[a-f]{2,4}){3,9}")
            sampling = SamplingParams(max_tokens=40, seed=id, grammar=grammar)
            core.handle(AddRequest(id, str(id), 0, 0, SOME_TEXT[: 8 + id], sampling))
            tokens[id] = []
        while core.has_requests:
            core.handle(PrerequisitesSettled())
            if not core.has_work:
                continue
            for output in core.step().outputs.get(0, []):
                assert output.error is None
                tokens[output.id] += output.token_ids
        texts.append(tokens)
        executor.shutdown()
    assert texts[0] == texts[1]


def test_cache_memory_includes_head_blocks_and_states(
    target: Checkpoint, head: Eagle3Reference
) -> None:
    config = settings(
        target.directory,
        head,
        {"num_kv_blocks": None, "block_size": 16, "kv_cache_memory_bytes": 16 << 20},
    )
    executor = InProcessExecutor(config)
    model, runner = executor._loaded.model, executor._runner
    assert model is not None
    assert runner is not None
    assert runner._head is not None
    drafting = runner._head.head
    block = bytes_per_block(model.spec, 16, PlainKv(torch.float32))
    block += bytes_per_block(drafting.spec, 16, PlainKv(torch.float32)) + 64 * 4
    most = 4 * (256 // 16)
    assert executor.info.num_kv_blocks == min(most, (16 << 20) // block)
    executor.shutdown()
