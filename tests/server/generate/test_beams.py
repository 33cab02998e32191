"""Beam search against that of transformers, over a made-up model of a small vocabulary."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from engine.shared.messages import TokenLogprob
from server.generate.beams import Beams, BeamSearch

VOCABULARY = 11


def logits_after(token_ids: Sequence[int], seed: int) -> torch.Tensor:
    """Return logits that depend on all previous tokens."""
    state = seed
    for token_id in token_ids:
        state = (state * 6364136223846793005 + token_id + 1442695040888963407) % 2**63
    generator = torch.Generator().manual_seed(state % 2**31)
    return torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) * 2


class MadeUpModel(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    config_class = PretrainedConfig

    def __init__(self, seed: int) -> None:
        config: dict[str, Any] = {"vocab_size": VOCABULARY, "is_encoder_decoder": False}
        super().__init__(PretrainedConfig(**config))
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.seed = seed

    def prepare_inputs_for_generation(self, input_ids: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Any, **_: Any) -> CausalLMOutput:
        rows = [logits_after(row[1:].tolist(), self.seed) for row in input_ids]
        return CausalLMOutput(logits=torch.stack(rows)[:, None, :])


def of_transformers(
    seed: int, beams: Beams, max_tokens: int, ends: list[int]
) -> list[tuple[int, ...]]:
    model: Any = MadeUpModel(seed)
    output = model.generate(
        torch.tensor([[0]]),
        max_new_tokens=max_tokens,
        num_beams=beams.width,
        num_return_sequences=beams.width,
        do_sample=False,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        eos_token_id=ends or None,
        pad_token_id=VOCABULARY - 1,
        use_cache=False,
    )
    found = []
    for row in output.tolist():
        tokens = row[1:]
        stop = next((place for place, each in enumerate(tokens) if each in ends), len(tokens))
        found.append(tuple(tokens[: stop + 1]))
    return found


def of_search(seed: int, beams: Beams, max_tokens: int, ends: list[int]) -> list[tuple[int, ...]]:
    search = BeamSearch(beams, max_tokens, frozenset(ends))
    while search.running:
        following = []
        for beam in search.running:
            scores = torch.log_softmax(logits_after(beam.token_ids, seed), dim=-1)
            top = torch.topk(scores, min(search.num_alternatives, VOCABULARY))
            ids, logprobs = top.indices.tolist(), top.values.tolist()
            following.append(TokenLogprob(logprobs[0], 1, ids, logprobs))
        search.advance(following)
    best = search.best(beams.width)
    for beam in best:
        assert math.isclose(beam.logprob_sum, sum(each.logprob for each in beam.scores))
        assert beam.ended is (beam.token_ids[-1] in ends)
    return [beam.token_ids for beam in best]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**30),
    width=st.integers(2, 5),
    max_tokens=st.integers(1, 8),
    ends=st.sampled_from([[], [3], [3, 4]]),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
def test_beam_search_answers_equal_transformers(
    seed: int, width: int, max_tokens: int, ends: list[int], length_penalty: float,
    early_stopping: Any,
) -> None:  # fmt: skip
    beams = Beams(width, length_penalty, early_stopping)
    expected = of_transformers(seed, beams, max_tokens, ends)
    assert of_search(seed, beams, max_tokens, ends) == expected


def test_one_beam_is_the_most_likely_token_each_time() -> None:
    (found,) = of_search(5, Beams(1), 6, [])
    tokens: list[int] = []
    for _ in range(6):
        tokens.append(int(torch.argmax(logits_after(tokens, 5))))
    assert found == tuple(tokens)


@pytest.mark.parametrize("shown", [0, 2])
def test_only_shown_alternatives_are_kept(shown: int) -> None:
    search = BeamSearch(Beams(3), 4, frozenset([1, 2]), shown)
    assert search.num_alternatives == 9
    while search.running:
        following = []
        for beam in search.running:
            top = torch.topk(torch.log_softmax(logits_after(beam.token_ids, 7), dim=-1), 9)
            ids, logprobs = top.indices.tolist(), top.values.tolist()
            following.append(TokenLogprob(logprobs[0], 1, ids, logprobs))
        search.advance(following)
    kept = [scores for beam in search.best(3) for scores in beam.scores]
    assert {len(each.top_ids) for each in kept} == {len(each.top_logprobs) for each in kept}
    assert {len(each.top_ids) for each in kept} == {shown}


@pytest.mark.parametrize("width", [1, 4])
def test_a_search_that_ends_at_once_has_one_token(width: int) -> None:
    assert [len(each) for each in of_search(5, Beams(width), 1, [])] == [1] * width
