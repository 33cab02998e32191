"""Step results other than tokens, and slot state kept between steps."""

from typing import Any

import pytest
import torch

from engine.batch.batch import BatchPlan, BatchResult, SlotStart
from engine.shared.messages import SamplingParams
from tests.engine.driver import Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.tiny_models import Checkpoint


@pytest.fixture
def model(checkpoint: SaveModel) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture
def engine(driver: LoadDriver, model: Checkpoint) -> Driver:
    return driver(model.directory)


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": 1, "temperature": 0.0, **settings})


def test_logprobs_come_in_row_order(engine: Driver, model: Checkpoint, prompt: MakePrompt) -> None:
    engine.start(0, prompt(12), sampling())
    engine.start(1, prompt(20), sampling(logprobs=3))
    result = engine.prefill(1, 0)
    expected = torch.log_softmax(model.logits(prompt(20))[-1], dim=-1)
    entry, none = result.logprobs or []
    assert entry is not None
    assert none is None
    assert entry.top_ids == expected.topk(3).indices.tolist()
    assert entry.logprob == pytest.approx(float(expected.max()), abs=1e-3)


@pytest.mark.parametrize("chunks", [(30,), (1, 20, 9)])
def test_prompt_logprobs_cover_every_token_but_the_first(
    chunks: tuple[int, ...], engine: Driver, model: Checkpoint, prompt: MakePrompt
) -> None:
    tokens = prompt(30)
    engine.start(4, prompt(9))
    engine.start(2, tokens, sampling(prompt_logprobs=2))
    engine.prefill(4)
    entries = []
    for size in chunks:
        result = engine.step({4: 1, 2: size})
        assert set(result.prompt_logprobs) <= {1}
        entries += result.prompt_logprobs.get(1, [])
    assert engine.step({4: 1, 2: 1}).prompt_logprobs == {}
    expected = torch.log_softmax(model.logits(tokens), dim=-1)
    assert len(entries) == 29
    for position, entry in enumerate(entries, start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-3)
        assert entry.rank == int((row > row[tokens[position]]).sum()) + 1
        assert entry.top_ids == row.topk(2).indices.tolist()


def test_unfinished_prompt_draws_nothing(engine: Driver, prompt: MakePrompt) -> None:
    engine.start(0, prompt(30))
    assert engine.step({0: 29}).token_ids == []
    assert len(engine.step({0: 1}).token_ids) == 1


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-moe"])
def test_computing_only_needed_states_does_not_change_samples(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    def step(prompt_logprobs: int | None) -> tuple[BatchResult, BatchResult]:
        engine = driver(checkpoint(name).directory)
        for slot, length in enumerate((40, 90, 25, 70)):
            engine.start(slot, prompt(length), sampling(logprobs=2))
        engine.prefill(0, 1)
        engine.start(9, prompt(30), sampling(prompt_logprobs=prompt_logprobs))
        computed = {0: 1, 1: 1, 2: 25, 3: 69, 9: 12}  # of which 3 and 9 draw nothing
        return engine.step(computed), engine.step({3: 1, 9: 18})

    # Prompt logprobs need the hidden states of all prompt tokens.
    for those, everything in zip(step(None), step(0), strict=True):
        assert everything.prompt_logprobs
        assert those.token_ids == everything.token_ids
        for one, other in zip(those.logprobs or [], everything.logprobs or [], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_seeded_tokens_do_not_depend_on_batch_or_restart(
    engine: Driver, prompt: MakePrompt
) -> None:
    drawn = sampling(temperature=1.0, top_p=0.95, seed=99, presence_penalty=0.4)
    engine.start(0, prompt(15), drawn)
    engine.prefill(0)
    engine.decode(19, 0)
    alone = engine.tokens[0][15:]

    for slot in range(1, 6):
        engine.start(slot, prompt(10 + slot), sampling(temperature=2.0, seed=slot))
    engine.prefill(*range(1, 6))
    engine.start(7, prompt(15), drawn)
    engine.prefill(7)
    engine.decode(9, 3, 7, 1, 5)
    engine.start(9, engine.tokens[7], drawn, num_prompt_tokens=15)
    engine.prefill(9)
    engine.decode(9, 2, 9)
    assert engine.tokens[9][15:] == alone


def test_new_sequence_in_slot_inherits_nothing(
    engine: Driver, model: Checkpoint, prompt: MakePrompt
) -> None:
    heavy = sampling(logit_bias={3: 100.0}, logprobs=1, repetition_penalty=1.5, min_tokens=40)
    engine.start(0, prompt(60), heavy)
    engine.prefill(0)
    engine.decode(3, 0)
    assert 3 in engine.tokens[0][60:]
    engine.start(0, prompt(14))
    assert engine.prefill(0).logprobs is None
    engine.decode(9, 0)
    assert engine.tokens[0][14:] == model.greedy(prompt(14), 10)


def test_sequence_can_fill_the_model_to_its_last_position(
    engine: Driver, prompt: MakePrompt
) -> None:
    engine.start(0, prompt(255))
    engine.prefill(0)
    engine.decode(1, 0)
    assert len(engine.tokens[0]) == 257


@pytest.mark.parametrize(("tokens", "named"), [([1, 256], "vocabulary"), ([-1], "vocabulary")])
def test_token_ids_outside_vocabulary_are_refused(
    tokens: list[int], named: str, engine: Driver
) -> None:
    start = SlotStart(0, tokens, len(tokens), sampling())
    with pytest.raises(ValueError, match=named):
        engine.runner.run(BatchPlan(0, [start], [], [], [], [], []))


def test_sequence_longer_than_the_model_is_refused(engine: Driver) -> None:
    start = SlotStart(0, [1] * 257, 257, sampling())
    with pytest.raises(ValueError, match="257 tokens"):
        engine.runner.run(BatchPlan(0, [start], [], [], [], [], []))
