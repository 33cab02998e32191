"""The decoder over paged KV blocks agrees with transformers, however a sequence is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from engine.shared.config import BUNDLED_MODEL
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.serving import request, serve
from tests.engine.tiny_models import MODELS, Checkpoint

TEXTS = [
    "ROMEO:\nI am",
    "First Citizen:\n",
    "The king",
    "KING RICHARD III:\nNow is the",
    "JULIET:\n",
    "To be",
    "MENENIUS:\nWhat",
    "Good morrow",
]
OF_OTHER_TESTS = {
    "llama-deep", "qwen3-moe-blocks", "qwen3-moe-deep", "gemma3-long", "phi3-long",
    "glm4-moe-blocks", "llama4-blocks",
}  # fmt: skip
"""Models that differ from another one only in the number of layers, in length or in size."""
ARCHITECTURES = [name for name in MODELS if name not in OF_OTHER_TESTS]
FAMILIES = list({MODELS[name][0]: name for name in ARCHITECTURES}.values())
"""One model of each, where what sets others of a family apart is not rounded."""
KINDS_OF_ATTENTION = [
    "llama",
    "mistral-window",  # all layers slide
    "qwen2-some-windows",  # two groups of layers with blocks of their own
    "gemma2",  # capped scores
    "smollm3",  # layers without positions
    "gpt-oss",  # sinks, and experts
    "deepseek3",  # a latent
    "ministral3",  # a temperature by position
    "llama4",  # chunks of the context
]
"""What the way in which a sequence is computed can matter to: the cache and positions. All else of
an architecture is computed token by token."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_and_chunked_logits_and_greedy_tokens_agree(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint(name)
    engine = driver(model.directory)
    tokens = prompt(150)
    expected = model.logits(tokens)
    engine.start(3, tokens[:90])
    assert (engine.logits({3: 90}) - expected[:90]).abs().max() < 1e-3
    engine.start(0, tokens)
    parts = [engine.logits({0: count}) for count in (5, 70, 1, 13, 60, 1)]
    assert (torch.cat(parts) - expected).abs().max() < 1e-3

    engine.start(5, tokens[:60])
    engine.prefill(5)
    engine.decode(33, 5)
    generated = engine.tokens[5][60:]
    assert generated == model.greedy(tokens[:60], 34, generated)


def test_sharded_checkpoint_loads(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("qwen2", max_shard_size="60KB")
    assert len(list(model.directory.glob("*.safetensors"))) > 2
    engine = driver(model.directory)
    engine.start(0, prompt(20))
    assert (engine.logits({0: 20}) - model.logits(prompt(20))).abs().max() < 1e-3


@pytest.mark.parametrize("name", KINDS_OF_ATTENTION)
def test_batch_of_mixed_lengths_equals_each_alone(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint(name)
    engine = driver(model.directory)
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 40, 64, 65, 66, 100, 120]
    slots = [(5 * i) % 16 for i in range(16)]
    for slot, length in zip(slots, lengths, strict=True):
        engine.start(slot, prompt(length))
    engine.prefill(*slots[:9])
    # Decodes, short prefills and long ones in one step, in no particular order.
    rows = {slot: 1 for slot in slots[:9]} | {slot: len(engine.tokens[slot]) for slot in slots[9:]}
    engine.step(dict(sorted(rows.items())))
    engine.decode(9, *reversed(slots))
    for slot, length in zip(slots, lengths, strict=True):
        generated = engine.tokens[slot][length:]
        assert generated == model.greedy(prompt(length), len(generated), generated), length


def test_lengths_far_apart_are_split_into_groups(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.attention.rows._FREE_PADDING", 32)
    model = checkpoint("mistral-window")
    engine = driver(model.directory)
    lengths = [200, 3, 90, 10, 45]
    for slot, length in enumerate(lengths):
        engine.start(slot, prompt(length))
    engine.prefill(*range(5))
    engine.decode(10, 3, 1, 4, 0, 2)
    for slot, length in enumerate(lengths):
        generated = engine.tokens[slot][length:]
        assert generated == model.greedy(prompt(length), 11, generated), length


def test_capped_scores_are_computed_in_parts(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.attention.paged._MAX_PLAIN_SCORES", 3000)
    model = checkpoint("gemma2")
    engine = driver(model.directory)
    tokens = prompt(150)
    engine.start(0, tokens)
    parts = [engine.logits({0: count}) for count in (80, 20, 50)]
    assert (torch.cat(parts) - model.logits(tokens)).abs().max() < 1e-3


def test_longrope_stretches_all_positions_of_a_longer_model(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("phi3-long")
    tokens = prompt(90)  # more than the original length, from which on the reference stretches
    engine = driver(model.directory)
    engine.start(0, tokens)
    assert (engine.logits({0: 90}) - model.logits(tokens)).abs().max() < 1e-3
    short = driver(model.directory, max_model_len=64)
    short.start(0, tokens[:60])
    assert (short.logits({0: 60}) - model.logits(tokens[:60])).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(
    dtype: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("qwen3")
    engine = driver(model.directory, dtype=dtype)
    assert str(engine.runner.model.dtype) == f"torch.{dtype}"
    engine.start(0, prompt(40))
    difference = engine.logits({0: 40}).float() - model.logits(prompt(40))
    scale = model.logits(prompt(40)).std()
    assert difference.abs().mean() < 0.03 * scale


@pytest.mark.parametrize(
    "scheduling",
    [{"async_scheduling": True}, {"speculative_ngram": 4}],
    ids=["overlapped", "drafted"],
)
@pytest.mark.parametrize("name", KINDS_OF_ATTENTION)
def test_scheduling_does_not_change_tokens(
    name: str, scheduling: dict[str, Any], checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    model = checkpoint(name)
    prompts = [prompt(60), prompt(9) * 3, prompt(3)]
    requests = [
        request(id, each, temperature=0.0, max_tokens=40) for id, each in enumerate(prompts)
    ]
    answers, stats = serve(model.directory, requests, dtype="float32", **scheduling)
    for each, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.greedy(each, 40, answer.tokens)
    assert (stats.counters.spec_draft_tokens > 0) == ("speculative_ngram" in scheduling)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_accurate_as_the_reference(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint(name)
    rounded = (
        type(model.reference)
        .from_pretrained(
            model.directory,
            dtype=torch.bfloat16,
            attn_implementation=model.reference.config._attn_implementation,
        )
        .eval()
    )
    engine = driver(model.directory, dtype="bfloat16")
    tokens = prompt(90)
    engine.start(0, tokens)
    exact = model.logits(tokens)
    with torch.inference_mode():
        reference = rounded(torch.tensor([tokens])).logits[0].float()
    own, other = (
        (logits - exact).abs().mean() for logits in (engine.logits({0: 90}).float(), reference)
    )
    # Rounding may choose another expert for one token, which changes all that follow.
    assert own < (5 if engine.runner.model.sparse_layers else 1.15) * other


def test_bundled_model_gives_same_answers_in_bfloat16() -> None:
    """64 greedy tokens each, but where two tokens are as likely as bfloat16 can tell."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(BUNDLED_MODEL, dtype=torch.bfloat16).eval()
    exact = load(BUNDLED_MODEL, dtype=torch.float32).eval()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    requests = [
        request(id, each, temperature=0.0, max_tokens=64) for id, each in enumerate(prompts)
    ]
    answers, _ = serve(BUNDLED_MODEL, requests, dtype="bfloat16")
    num_equal = 0
    for each, answer in zip(prompts, answers, strict=True):
        expected = Checkpoint(BUNDLED_MODEL, reference).greedy(each, 64, answer.tokens)
        differing = [i for i in range(64) if answer.tokens[i] != expected[i]]
        num_equal += not differing
        if differing:
            at = differing[0]
            logits = Checkpoint(BUNDLED_MODEL, exact).logits(each + expected[:at])[-1]
            largest = logits[[expected[at], answer.tokens[at]]]
            step = 2.0 ** (largest.abs().max().log2().floor() - 7)
            assert (largest[0] - largest[1]).abs() < step
    assert num_equal >= len(TEXTS) // 4  # processors differ in which ties they break


def test_unused_blocks_hold_zeros(checkpoint: SaveModel, driver: LoadDriver) -> None:
    engine = driver(checkpoint("llama").directory)
    assert all(not layer.any() for layer in engine.runner._cache)


def test_empty_plan_is_a_dummy_step(checkpoint: SaveModel, driver: LoadDriver) -> None:
    engine = driver(checkpoint("llama").directory)
    assert engine.step({}).token_ids == []
