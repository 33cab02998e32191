"""Every sampling parameter compared with a simple reference, and reproducible sampling."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.batch.batch import SlotStart
from engine.runner.compiled_draws import drawing_for
from engine.runner.filters import WITH_TORCH
from engine.runner.sampler import Sampled, sample
from engine.runner.slots import SlotTable
from engine.shared.messages import SamplingParams

CPU = torch.device("cpu")
VOCAB = 1000
SLOTS = 600
EOS = 7


Start: TypeAlias = Callable[..., int]
Draw: TypeAlias = Callable[[torch.Tensor, npt.ArrayLike, npt.ArrayLike], Sampled]


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(
        max_num_seqs=SLOTS, max_model_len=64, block_size=8, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )


@pytest.fixture
def start(table: SlotTable) -> Start:
    """Return a function that assigns tokens and parameters to a slot."""

    def start(
        slot: int, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **sampling: Any
    ) -> int:
        params = SamplingParams(max_tokens=64, **{"seed": slot, **sampling})
        tokens = [*prompt, *output]
        table.start(SlotStart(slot, tokens, len(prompt), params))
        return len(tokens)

    return start


@pytest.fixture(params=["torch", "kernels"])
def draw(table: SlotTable, request: pytest.FixtureRequest) -> Draw:
    """Return a function that samples rows of logits for slots whose next position is given."""
    drawing = WITH_TORCH if request.param == "torch" else drawing_for(torch.bfloat16, CPU)

    def draw(logits: torch.Tensor, slots: npt.ArrayLike, positions: npt.ArrayLike) -> Sampled:
        with torch.inference_mode():
            return sample(logits, table, np.array(slots), np.array(positions), drawing=drawing)

    return draw


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def reference_probabilities(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """One row, token by token, in float64: min-p, then top-k, then top-p."""
    p = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept = [token for token in order if p[token] >= min_p * p[order[0]]]
    if top_k:
        kept = kept[:top_k]
    total = sum(p[token] for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if nucleus and sum(p[t] for t in nucleus) >= top_p * total:
            break
        nucleus.append(token)
    mass = sum(p[token] for token in nucleus)
    return {token: p[token] / mass for token in nucleus}


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 500, "temperature": 4.0},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 10.0},
    {"min_p": 0.05},
    {"min_p": 0.001, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.7, "temperature": 1.5},
    {"top_k": 400, "top_p": 0.95, "min_p": 1e-4, "temperature": 8.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(
    filters: dict[str, Any], start: Start, draw: Draw
) -> None:
    logits = random_logits(1)
    expected = reference_probabilities(logits[0], **filters)
    positions = [start(slot, **filters) for slot in range(SLOTS)]
    rows = logits.expand(SLOTS, -1).contiguous()
    drawn = np.concatenate(
        [draw(rows, range(SLOTS), np.array(positions) + shift).token_ids for shift in range(20)]
    )
    assert set(drawn.tolist()) <= set(expected)
    likely = sorted(expected, key=expected.__getitem__)[-12:]
    counts = np.array([(drawn == token).sum() for token in likely], float)
    wanted = np.array([expected[token] for token in likely]) * len(drawn)
    rest = len(drawn) - wanted.sum()
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    if rest > 5:
        chi_square += (len(drawn) - counts.sum() - rest) ** 2 / rest
    assert chi_square < 40  # 12 degrees of freedom: exceeded once in ten thousand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equals(dtype: torch.dtype, start: Start, draw: Draw) -> None:
    logits = random_logits(4).to(dtype)
    logits[0, [900, 300, 555]] = 50
    logits[1] = -3.0
    logits[2] = logits[2].abs() * -1 - 1
    positions = [start(slot, temperature=0.0) for slot in range(4)]
    chosen = draw(logits, range(4), positions).token_ids
    assert chosen.tolist()[:2] == [300, 0]
    assert chosen.tolist()[2:] == logits[2:].float().numpy().argmax(-1).tolist()


def test_greedy_and_drawn_rows_mix(start: Start, draw: Draw) -> None:
    logits = random_logits(6)
    positions = [start(s, temperature=0.0 if s % 2 else 1.0, top_k=s // 2) for s in range(6)]
    together = draw(logits, range(6), positions).token_ids
    alone = [draw(logits[s : s + 1], [s], positions[s : s + 1]).token_ids[0] for s in range(6)]
    assert together.tolist() == alone
    assert together[1::2].tolist() == logits[1::2].argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [VOCAB, 128 * 7])
def test_draw_depends_on_seed_and_position_only(vocab: int, start: Start, draw: Draw) -> None:
    logits = random_logits(1, vocab=vocab).expand(SLOTS, -1).contiguous()
    filters = [{}, {"top_p": 0.9}, {"top_k": 300, "temperature": 2.0}, {"min_p": 0.01}]
    positions = [start(slot, seed=slot % 50, **filters[slot % 4]) for slot in range(400)]
    position = positions[0]
    first = draw(logits[:400], range(400), [position] * 400).token_ids
    order = np.random.default_rng(0).permutation(400)[:37]
    again = draw(logits[:37], order, [position] * 37).token_ids
    assert again.tolist() == first[order].tolist()
    assert (first[:200] == first[200:]).all()
    other = draw(logits[:400], range(400), [position + 1] * 400).token_ids
    assert (first != other).mean() > 0.5


def test_seeds_of_any_size_and_sign_work(start: Start, draw: Draw) -> None:
    logits = random_logits(3)
    positions = [start(slot, seed=seed) for slot, seed in enumerate((-1, 2**64 - 1, 2**63))]
    drawn = draw(logits[:1].expand(3, -1).contiguous(), range(3), positions).token_ids
    assert drawn[0] == drawn[1]


def test_repetition_penalty_covers_prompt_and_output(start: Start, draw: Draw) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 1:6] = torch.tensor([4.0, 4.0, 2.5, -1.0, 3.0])
    position = start(0, prompt=(1, 1, 4), output=(2, 2), temperature=0.0, repetition_penalty=2.0)
    assert draw(logits, [0], [position]).token_ids.tolist() == [5]
    logits[0, 5] = 1.9
    assert draw(logits, [0], [position]).token_ids.tolist() == [3]
    logits[0, 3] = -9
    logits[0, 5] = -1.5  # the halved 4.0 wins, the doubled -1.0 does not
    assert draw(logits, [0], [position]).token_ids.tolist() == [1]


def test_presence_and_frequency_penalties_cover_output_only(start: Start, draw: Draw) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 11], logits[:, 12] = 5.0, 4.5, 4.2
    frequency = start(
        0, prompt=(12,) * 5, output=(10, 10, 11), temperature=0.0, frequency_penalty=0.3
    )
    presence = start(
        1, prompt=(12,) * 5, output=(10, 10, 11), temperature=0.0, presence_penalty=0.6
    )
    # 5 - 2 * 0.3 = 4.4 beats 4.2 = 4.5 - 0.3, and 5 - 0.6 = 4.4 beats 4.2.
    assert draw(logits, [0, 1], [frequency, presence]).token_ids.tolist() == [10, 10]
    logits[:, 12] = 4.45
    assert draw(logits, [0, 1], [frequency, presence]).token_ids.tolist() == [12, 12]


def test_penalized_rows_do_not_affect_others(start: Start, draw: Draw) -> None:
    logits = random_logits(3)
    positions = [
        start(s, temperature=0.0, logit_bias={5: 100.0} if s == 1 else {}) for s in range(3)
    ]
    kept = logits.clone()
    expected = logits.argmax(-1).tolist()
    expected[1] = 5
    assert draw(logits, range(3), positions).token_ids.tolist() == expected
    assert torch.equal(logits, kept)


def test_logit_bias_forces_and_bans(start: Start, draw: Draw) -> None:
    logits = random_logits(2).bfloat16()
    best = int(logits[1].float().argmax())
    positions = [
        start(0, temperature=0.0, logit_bias={77: 100.0, VOCAB + 5: 100.0}),
        start(
            1, temperature=1.0, logit_bias={token: -1000.0 for token in range(VOCAB) if token != 3}
        ),
    ]
    assert draw(logits, [0, 1], positions).token_ids.tolist() == [77, 3]
    assert best != 3


def test_end_tokens_are_forbidden_before_min_tokens(start: Start, draw: Draw) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, EOS], logits[:, 20], logits[:, 30] = 9.0, 8.0, 7.0
    options = {"temperature": 0.0, "stop_token_ids": (20,), "min_tokens": 2}
    positions = [
        start(0, output=(4,), **options),
        start(1, output=(4, 4), **options),
        start(2, output=(4,), ignore_eos=True, **options),
        start(3, output=(4,), **{**options, "stop_token_ids": ()}),
    ]
    assert draw(logits, range(4), positions).token_ids.tolist() == [30, EOS, EOS, 20]


def test_draft_rows_count_the_tokens_before_them_toward_min_tokens(
    start: Start, draw: Draw
) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 30] = 9.0, 7.0
    position = start(0, output=(4,), temperature=0.0, min_tokens=3)
    positions = [position, position + 1, position + 2]
    assert draw(logits, [0, 0, 0], positions).token_ids.tolist() == [30, 30, EOS]


def test_logprobs_are_of_the_raw_logits(start: Start, draw: Draw) -> None:
    logits = random_logits(3)
    positions = [
        start(0, temperature=0.3, logprobs=4, logit_bias={50: 100.0}, top_k=3),
        start(1, temperature=0.0),
        start(2, temperature=0.0, logprobs=0),
    ]
    sampled = draw(logits, range(3), positions)
    reference = torch.log_softmax(logits.double(), dim=-1)
    first, none, last = sampled.logprobs or []
    assert sampled.token_ids[0] == 50
    assert first is not None
    assert last is not None
    assert first.logprob == pytest.approx(float(reference[0, 50]), abs=1e-5)
    assert first.rank == int((reference[0] > reference[0, 50]).sum()) + 1
    values, ids = reference[0].topk(4)
    assert first.top_ids == ids.tolist()
    assert first.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)
    assert none is None
    assert (last.rank, last.top_ids) == (1, [])


def test_logprobs_of_named_tokens_are_reported_in_their_order(start: Start, draw: Draw) -> None:
    logits = random_logits(3)
    positions = [
        start(0, temperature=0.0, logprobs=3, logprob_token_ids=(9, 2, 40)),
        start(1, temperature=0.0, logprobs=2),
        start(2, temperature=0.0, logprobs=1, logprob_token_ids=(5,)),
    ]
    found = draw(logits, range(3), positions).logprobs
    entries = [entry for entry in found or [] if entry is not None]
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert [entry.top_ids for entry in entries[::2]] == [[9, 2, 40], [5]]
    assert entries[0].top_logprobs == pytest.approx(reference[0, [9, 2, 40]].tolist(), abs=1e-5)
    assert entries[2].top_logprobs == pytest.approx(reference[2, [5]].tolist(), abs=1e-5)
    assert entries[1].top_ids == reference[1].topk(2).indices.tolist()


def test_equal_logprobs_are_listed_by_id(start: Start, draw: Draw) -> None:
    logits = torch.full((1, VOCAB), -4.0, dtype=torch.bfloat16)
    logits[0, [600, 40, 300]] = 2.0
    (entry,) = draw(logits, [0], [start(0, temperature=0.0, logprobs=5)]).logprobs or []
    assert entry is not None
    assert entry.top_ids == [40, 300, 600, 0, 1]
    assert entry.rank == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-4])
def test_tiny_temperatures_act_like_greedy(temperature: float, start: Start, draw: Draw) -> None:
    logits = random_logits(5)
    positions = [start(slot, temperature=temperature) for slot in range(5)]
    chosen = draw(logits, range(5), positions).token_ids
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_only_allowed_tokens_are_drawn(start: Start, draw: Draw) -> None:
    logits = random_logits(3)
    positions = [
        start(0, temperature=0.0, allowed_token_ids=(4, 9, 30)),
        start(1, temperature=5.0, allowed_token_ids=(8,)),
        start(2, temperature=0.0),
    ]
    best = int(logits[0, [4, 9, 30]].argmax())
    expected = [(4, 9, 30)[best], 8, int(logits[2].argmax())]
    assert draw(logits, range(3), positions).token_ids.tolist() == expected


def test_a_token_is_sampled_even_if_none_is_allowed(start: Start, draw: Draw) -> None:
    options = {"allowed_token_ids": (EOS, 20), "stop_token_ids": (20,), "min_tokens": 3}
    positions = [start(slot, **options) for slot in range(20)]
    drawn = set(draw(random_logits(20), range(20), positions).token_ids.tolist())
    assert drawn == {EOS, 20}


def test_bad_words_are_not_completed(start: Start, draw: Draw) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, 20], logits[:, 30], logits[:, 40] = 9.0, 8.0, 7.0
    options = {"temperature": 0.0, "bad_words": ((5, 6, 20), (30,))}
    positions = [
        start(0, output=(1, 5, 6), **options),
        start(1, output=(5, 6, 1), **options),
        start(2, prompt=(5, 6), **options),
        start(3, prompt=(5,), output=(6,), **options),
        start(4, prompt=(5,), output=(5, 6), **{**options, "bad_words": ((5, 6, 20),)}),
    ]
    assert draw(logits, range(5), positions).token_ids.tolist() == [40, 20, 20, 20, 30]
