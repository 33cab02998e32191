"""Rows with a grammar sample allowed tokens with any parameters; other rows are unaffected."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.batch.batch import SlotStart
from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.grammar.masks import GrammarTable, TokenMasks
from engine.runner.penalties import forbid_on_device, forbid_others
from engine.runner.sampler import sample
from engine.runner.slots import SlotTable
from engine.shared.config import (
    BUNDLED_MODEL,
)
from engine.shared.messages import AddRequest, RegexGrammar, SamplingParams
from tests.engine.configs import config_of
from tests.engine.fixtures import SaveModel
from tests.support.waiting import PATIENCE

VOCAB = 1000
EOS = 7


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(
        max_num_seqs=8, max_model_len=64, block_size=8, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )


def masks(allowed: dict[int, list[int]]) -> TokenMasks:
    flags = np.zeros((len(allowed), -(-VOCAB // 32) * 32), np.bool_)
    for index, tokens in enumerate(allowed.values()):
        flags[index, tokens] = True
    return TokenMasks(
        np.array(list(allowed), np.int64),
        np.packbits(flags, axis=1, bitorder="little").view(np.int32),
    )


def random_logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)).to(dtype) * 3


def draw(
    table: SlotTable, logits: torch.Tensor, allowed: dict[int, list[int]], **sampling: object
) -> list[int]:
    slots = np.arange(len(logits))
    for slot in slots.tolist():
        params = SamplingParams(max_tokens=64, seed=slot, **sampling)  # type: ignore[arg-type]
        table.start(SlotStart(slot, [1, 2, 3], 2, params))
    with torch.inference_mode():
        before = logits.clone()
        drawn = sample(logits, table, slots, np.full(len(slots), 3), masks(allowed))
        assert torch.equal(before, logits), "logprobs are those of the model"
    token_ids: list[int] = drawn.token_ids.tolist()
    return token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.4, "min_p": 0.1},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -1.0},
        {"logit_bias": {500: 100.0}},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_only_allowed_tokens_are_sampled(
    table: SlotTable, sampling: dict[str, object], dtype: torch.dtype
) -> None:
    logits = random_logits(5, dtype)
    allowed = {1: [0, 999, 31, 32], 2: [640], 4: list(range(100, 200))}
    drawn = draw(table, logits, allowed, **sampling)
    for row, tokens in allowed.items():
        assert drawn[row] in tokens
    unmasked = draw(table, logits, {0: list(range(VOCAB))}, **sampling)
    assert [drawn[0], drawn[3]] == [unmasked[0], unmasked[3]]


def test_the_relative_odds_of_allowed_tokens_stay_the_same(table: SlotTable) -> None:
    logits = torch.full((8, VOCAB), 50.0)
    logits[:, [10, 11]] = torch.tensor([1.0, 0.0])
    counts = {10: 0, 11: 0}
    for seed in range(60):
        for slot in range(8):
            params = SamplingParams(max_tokens=64, seed=1000 * seed + slot)
            table.start(SlotStart(slot, [1, 2], 2, params))
        with torch.inference_mode():
            drawn = sample(
                logits,
                table,
                np.arange(8),
                np.full(8, 2),
                masks({row: [10, 11] for row in range(8)}),
            )
        for token in drawn.token_ids.tolist():
            counts[token] += 1
    assert 0.65 < counts[10] / 480 < 0.81  # e / (1 + e) = 0.731


def test_min_tokens_yields_if_only_end_token_is_allowed(table: SlotTable) -> None:
    logits = random_logits(3)
    drawn = draw(table, logits, {0: [EOS], 1: [EOS, 20]}, min_tokens=30, temperature=0.0)
    assert drawn[:2] == [EOS, 20]
    assert drawn[2] != EOS


def test_row_without_allowed_tokens_does_not_affect_others(table: SlotTable) -> None:
    logits = random_logits(3)
    drawn = draw(table, logits, {1: []})
    others = draw(table, logits, {0: list(range(VOCAB))})
    assert [drawn[0], drawn[2]] == [others[0], others[2]]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_masks_are_the_same_on_an_accelerator(device: str) -> None:
    allowed = masks({0: [0, 31, 32, 999], 2: [5], 3: []})
    here = random_logits(5)
    there = here.to(device, copy=True)
    forbid_others(here, allowed)
    forbid_on_device(there, allowed)
    assert torch.equal(here, there.cpu())
    assert here[0].isfinite().nonzero()[:, 0].tolist() == [0, 31, 32, 999]
    assert here[1].isfinite().all()


def generate(
    spec: RegexGrammar, directory: Path = BUNDLED_MODEL, **scheduling: Any
) -> dict[int, list[int]]:
    """Return the tokens of five requests with the grammar and of one without."""
    drawn = {"load_format": "auto" if directory == BUNDLED_MODEL else "dummy"}
    config = config_of(directory, model=drawn, scheduler={"max_num_seqs": 4} | scheduling)
    executor = InProcessExecutor(config)
    tokens: dict[int, list[int]] = {id: [] for id in range(6)}
    try:
        core = EngineCore(config, executor, rank=0, incarnation=1)
        core.front_end_joined(0, 1)
        assert executor.grammars is not None
        executor.grammars.request(spec).wait()
        for id in range(6):
            sampling = SamplingParams(max_tokens=20, seed=9 - id, grammar=spec if id < 5 else None)
            core.handle(AddRequest(id, "r", 0, 0, [40, 50, 60 + id], sampling))
        while core.has_work:
            for output in core.step().outputs.get(0, []):
                tokens[output.id] += output.token_ids
                assert output.finish_reason in (None, "stop" if output.id < 5 else "length")
        assert not executor.grammars._followers
    finally:
        executor.shutdown()
    return tokens


def test_a_real_model_follows_grammars_with_overlap_and_with_drafts() -> None:
    spec = RegexGrammar("(ab|ba){3,8}")
    tokens = generate(spec)
    assert generate(spec, async_scheduling=True) == tokens
    assert generate(spec, speculative_ngram=4, prompt_lookup_min=1) == tokens
    assert generate(spec, speculative_model=str(BUNDLED_MODEL)) == tokens
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    for id in range(5):
        assert re.fullmatch(spec.pattern, tokenizer.decode(tokens[id]))


@pytest.mark.parametrize("flags", [{}, {"async_scheduling": True}, {"speculative_ngram": 4}])
def test_tokens_without_mask_in_time_are_sampled_again(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RegexGrammar("[a-z]{3,5}-[0-9]{2}")
    tokens = generate(spec)
    advance, times = GrammarTable.advance, itertools.count()

    def now_and_then(self: GrammarTable, *drawn: Any) -> Any:
        late = next(times) % 3 == 1
        monkeypatch.setattr("engine.grammar.masks.ADVANCE_SECONDS", -1.0 if late else PATIENCE)
        return advance(self, *drawn)

    monkeypatch.setattr(GrammarTable, "advance", now_and_then)
    assert generate(spec, **flags) == tokens


@pytest.mark.parametrize("name", ["gpt-oss", "glm4-moe", "deepseek3"])
def test_models_with_experts_follow_grammars_with_overlap_and_with_drafts(
    name: str, checkpoint: SaveModel, tmp_path: Path
) -> None:
    config = json.loads((checkpoint(name).directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    for file in (*BUNDLED_MODEL.glob("tokenizer*"), BUNDLED_MODEL / "generation_config.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spec = RegexGrammar("[a-z]{3,5}-[0-9]{2}")
    tokens = generate(spec, tmp_path)
    assert generate(spec, tmp_path, async_scheduling=True) == tokens
    assert generate(spec, tmp_path, speculative_ngram=4, prompt_lookup_min=1) == tokens
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    for id in range(5):
        assert re.fullmatch(spec.pattern, tokenizer.decode(tokens[id]))
