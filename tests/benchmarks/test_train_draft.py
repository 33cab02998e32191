"""A draft head is trained on what a model says, and drafts for it in an engine."""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.draft_head.module import HeadModule
from benchmarks.draft_head.prompts import Prompt, prompts
from benchmarks.draft_head.store import load_answers
from benchmarks.speculation_bench import QUESTIONS
from benchmarks.train_draft import parser, train, write_answers
from engine.models.hf_config import read_spec
from engine.shared.config import BUNDLED_MODEL
from tests.engine.draft_heads import note_proposals
from tests.engine.serving import request, serve
from tests.engine.tiny_models import Checkpoint, save_tiny_model

LAYERS = (2, 3, 4)
REQUESTS = [request(id, list(range(id, 40)), temperature=0, max_tokens=30) for id in range(3)]


def asked() -> Iterator[Prompt]:
    for number in itertools.count():
        start = number % 50
        yield Prompt(list(range(start, start + 5 + number % 9)), float(number % 2), number)


def options_for(target: Checkpoint, directory: Path, *more: str) -> argparse.Namespace:
    paths = [str(target.directory), str(directory / "head"), "--answers", str(directory / "said")]
    sizes = ["--tokens", "800", "--answer-tokens", "20", "--longest", "60", "--vocabulary", "200"]
    return parser().parse_args([*paths, *sizes, "--batch", "150", *more])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_tiny_model("llama-deep", tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def answered(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the answers of the model."""
    directory = tmp_path_factory.mktemp("answered")
    write_answers(options_for(target, directory), LAYERS, asked())
    return directory


def test_prompts_follow_from_the_seed_and_are_none_of_those_that_are_measured() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    first, again, other = (
        list(itertools.islice(prompts(tokenizer, seed), 60)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {prompt.temperature for prompt in first} == {0.0, 1.0}
    said = [tokenizer.decode(prompt.token_ids) for prompt in first]
    assert not any(question in text for question in QUESTIONS for text in said)


def test_kept_states_are_those_of_the_model(target: Checkpoint, answered: Path) -> None:
    answers = list(load_answers(answered / "said"))
    assert sum(len(each.token_ids) for each in answers) >= 800
    for each in answers[:: len(answers) // 5]:
        tapped, final = states_of(target, each.token_ids[:-1].long())
        torch.testing.assert_close(each.tapped.float(), tapped, rtol=0.02, atol=0.02)
        torch.testing.assert_close(each.final.float(), final, rtol=0.02, atol=0.02)


@torch.inference_mode()
def states_of(target: Checkpoint, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    out = target.reference.model(token_ids.unsqueeze(0), output_hidden_states=True)
    tapped = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)
    return tapped, out.last_hidden_state[0]


def test_training_lessens_the_loss_and_its_head_drafts_in_an_engine(
    target: Checkpoint, answered: Path
) -> None:
    untrained = train(options_for(target, answered, "--updates", "0"), LAYERS)
    trained = train(options_for(target, answered, "--epochs", "4", "--rate", "3e-3"), LAYERS)
    assert trained.loss < 0.9 * untrained.loss
    expected, _ = serve(target.directory, REQUESTS, dtype="float32")
    answers, stats = serve(
        target.directory,
        REQUESTS,
        dtype="float32",
        speculative_model=str(answered / "head"),
        num_speculative_tokens=3,
    )
    assert [each.tokens for each in answers] == [each.tokens for each in expected]
    assert stats.counters.spec_draft_tokens > 0


def test_what_is_trained_is_what_the_engine_computes(
    target: Checkpoint, answered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(options_for(target, answered, "--updates", "3"), LAYERS)
    directory = answered / "head"
    tensors = load_file(directory / "model.safetensors")
    lm_head, offsets = tensors.pop("lm_head.weight"), tensors.pop("d2t")
    head = HeadModule(read_spec(target.directory), tensors, longest=100)
    token_ids = torch.arange(len(offsets)) + offsets
    proposals = note_proposals(monkeypatch)
    serve(
        target.directory,
        REQUESTS,
        dtype="float32",
        speculative_model=str(directory),
        num_speculative_tokens=4,
    )
    long = [each for each in proposals.made if len(each.drafted) > 2]
    assert long
    for after, drafted in long[:: 1 + len(long) // 10]:
        known = torch.tensor(after)
        tapped, _ = states_of(target, known)
        # The head is given the model's states of all tokens but the newest.
        filled = torch.zeros(len(after) + len(drafted) - 2, tapped.shape[1])
        filled[: len(after) - 1] = tapped[:-1]
        tokens = torch.tensor([*after, *drafted])[1:-1]
        embedded = target.reference.model.embed_tokens(tokens)
        with torch.no_grad():
            states = head.states(embedded.unsqueeze(0), filled.unsqueeze(0), len(drafted))
        for step, found in enumerate(states):
            best = (found[0, len(after) - 2 + step] @ lm_head.T).argmax()
            assert int(token_ids[best]) == drafted[step], (len(after), step)
