"""Sequences with images match transformers, for any division into steps."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.shared.messages import EncoderInput
from tests.engine.driver import Driver
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.images import encoder_input
from tests.engine.tiny_models import IMAGE_TOKEN, Checkpoint

TOKENS = {
    "smolvlm": 4, "idefics3": 16, "qwen2-vl": 16, "qwen2.5-vl": 16, "gemma3-vision": 16,
    "mistral3": 19, "llava": 16, "llava-siglip": 16, "llava-pixtral": 19, "internvl": 16,
}  # fmt: skip
"""Of an image of 32 x 32 pixels, including those of text between its rows."""
NAMES = [name for name in TOKENS if name != "gemma3-vision"]
_BREAK = 252
"""Text between the rows of an image."""


def text(prompt: MakePrompt, length: int) -> list[int]:
    return [token % 250 for token in prompt(length)]


def shown(count: int) -> list[int]:
    """Return the tokens of an image, in rows if it has 19."""
    row = [IMAGE_TOKEN] * 4
    return [*row, _BREAK, *row, _BREAK, *row, _BREAK, *row] if count == 19 else row * (count // 4)


def logits_in_steps(
    engine: Driver,
    tokens: list[int],
    images: list[EncoderInput],
    chunks: tuple[int, ...],
    cached: int,
) -> torch.Tensor:
    """Return the logits of a prompt in chunks, or of the part after a cached prefix."""
    engine.start(0, tokens, images=images)
    if not cached:
        return torch.cat([engine.logits({0: chunk}) for chunk in chunks])
    engine.logits({0: len(tokens)})
    engine.start(1, tokens, images=images, cached_blocks=engine.blocks[0][: cached // 8])
    return engine.logits({1: len(tokens) - cached})


@pytest.mark.parametrize("chunks", [(90,), (12, 3, 2, 1, 1, 71), (1,) * 90, (20, 20, 20, 30)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_prompts_with_images_agree_with_transformers(
    name: str,
    chunks: tuple[int, ...],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    tokens = text(prompt, 13) + shown(count) + text(prompt, 1) + shown(count)
    tokens += text(prompt, 75 - 3 * count) + shown(count) + text(prompt, 1)
    first = encoder_input(1, 13, num_tokens=count)
    second = encoder_input(2, 14 + count, num_tokens=count)
    again = encoder_input(1, 89 - count, num_tokens=count)
    images = [first, second, again]
    engine = driver(model.directory)
    engine.start(3, tokens, images=images)
    logits = torch.cat([engine.logits({3: chunk}) for chunk in chunks])
    expected = model.logits_with_images(tokens, images)
    assert (logits - expected).abs().max() < 1e-3
    without = model.logits(tokens)
    assert (logits[13:] - without[13:]).abs().max() > 0.1, "images make a difference"


@pytest.mark.parametrize("name", ["smolvlm", "qwen2.5-vl", "gemma3-vision", "mistral3"])
def test_batches_mix_sequences_with_images_and_without(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    seen = text(prompt, 9) + shown(count) + text(prompt, 20)
    plain = text(prompt, 31)
    images = {slot: [encoder_input(slot, 9, num_tokens=count)] for slot in (0, 2)}
    engine = driver(model.directory)
    engine.start(0, seen, images=images[0])
    engine.start(1, plain)
    engine.start(2, seen, images=images[2])
    length = len(seen)
    logits = engine.logits({0: length, 1: 31, 2: length})
    first, other, second = torch.split(logits, [length, 31, length])
    for slot, part in ((0, first), (2, second)):
        expected = model.logits_with_images(seen, images[slot])
        assert (part - expected).abs().max() < 1e-3
    assert (other - model.logits(plain)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("chunks", "cached"), [((62,), 0), ((10, 30, 22), 0), ((1,) * 62, 0), ((14,), 48)]
)
def test_image_tokens_of_any_shape_have_2d_positions(
    chunks: tuple[int, ...],
    cached: int,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model = checkpoint("qwen2.5-vl")
    wide = encoder_input(1, 5, num_tokens=15, side=24, width=40)
    high = encoder_input(2, 22, num_tokens=12, side=48, width=16)
    narrow = encoder_input(3, 38, num_tokens=15, side=8, width=120)
    tokens = text(prompt, 5) + [IMAGE_TOKEN] * 15 + text(prompt, 2) + [IMAGE_TOKEN] * 12
    tokens += text(prompt, 4) + [IMAGE_TOKEN] * 15 + text(prompt, 9)
    images = [wide, high, narrow]
    expected = model.logits_with_images(tokens, images)
    logits = logits_in_steps(driver(model.directory), tokens, images, chunks, cached)
    assert (logits - expected[cached:]).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("chunks", "cached"),
    [((90,), 0), ((13, 17, 32, 16, 12), 0), ((10, 80), 0), ((29, 61), 0), ((50,), 40), ((26,), 64)],
)
def test_gemma_image_tokens_attend_to_entire_image(
    chunks: tuple[int, ...],
    cached: int,
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model = checkpoint("gemma3-vision")
    tokens = text(prompt, 13) + shown(16) + text(prompt, 1) + shown(16)
    tokens += text(prompt, 16) + shown(16) + text(prompt, 12)
    images = [
        encoder_input(seed, position, num_tokens=16)
        for seed, position in ((1, 13), (2, 30), (1, 62))
    ]
    expected = model.logits_with_images(tokens, images)
    logits = logits_in_steps(driver(model.directory), tokens, images, chunks, cached)
    assert (logits - expected[cached:]).abs().max() < 1e-3


def test_gemma_image_tokens_have_same_bits_after_cached_prefix(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    tokens = text(prompt, 21) + shown(16) + text(prompt, 4)
    images = [encoder_input(1, 21, num_tokens=16)]
    engine = driver(checkpoint("gemma3-vision").directory, batch_invariant=True)
    engine.start(0, tokens, images=images)
    whole = engine.logits({0: 41})
    engine.start(1, tokens, images=images, cached_blocks=engine.blocks[0][:4])
    engine.start(2, text(prompt, 30))
    assert torch.equal(engine.logits({2: 30, 1: 9})[30:], whole[32:])


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3-vision"])
def test_text_sequences_have_same_bits_next_to_images(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model, plain = checkpoint(name), text(prompt, 31)
    engine = driver(model.directory, batch_invariant=True)
    seen, images = shown(16) + text(prompt, 20), [encoder_input(1, 0, num_tokens=16)]
    engine.start(0, plain)
    alone = engine.logits({0: 31})
    engine.start(0, plain)
    engine.start(1, seen, images=images)
    beside = engine.logits({1: 36, 0: 31})
    assert torch.equal(beside[36:], alone)


def test_slot_keeps_no_image_of_previous_sequence(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("smolvlm")
    engine = driver(model.directory)
    tokens = text(prompt, 9) + shown(4)
    engine.start(0, tokens, images=[encoder_input(1, 9, num_tokens=4)])
    engine.prefill(0)
    engine.start(0, tokens)
    assert (engine.logits({0: 13}) - model.logits(tokens)).abs().max() < 1e-3


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
@pytest.mark.parametrize("name", TOKENS)
def test_quantized_text_model_accepts_images(
    name: str,
    options: dict[str, Any],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    tokens = text(prompt, 13) + shown(count) + text(prompt, 20)
    images = [encoder_input(1, 13, num_tokens=count)]
    engine = driver(model.directory, **options)
    engine.start(0, tokens, images=images)
    rows = engine.logits({0: 13 + count}), engine.logits({0: 20})
    expected = model.logits_with_images(tokens, images)
    errors = (torch.cat(rows) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.1


@pytest.mark.parametrize("name", TOKENS)
def test_a_text_model_in_4_bits_is_as_exact_with_images_as_with_text(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    plain = text(prompt, 33 + count)
    tokens = plain[:13] + shown(count) + plain[:20]
    images = [encoder_input(1, 13, num_tokens=count)]
    engine = driver(model.directory, quantization="int4", dtype="bfloat16")
    engine.start(0, tokens, images=images)
    engine.start(1, plain)
    errors = []
    for found, expected in (
        (engine.logits({0: len(tokens)}), model.logits_with_images(tokens, images)),
        (engine.logits({1: len(plain)}), model.logits(plain)),
    ):
        errors.append(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())
    assert errors[0] < 1.25 * errors[1]


@pytest.mark.parametrize("name", TOKENS)
def test_fp8_text_models_accept_images(
    name: str, checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt, tmp_path: Path
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    reference = copy.deepcopy(model.reference)
    stored = load_file(model.directory / "model.safetensors")
    of_text = [each for each in stored if "_proj.weight" in each and "vis" not in each]
    parameters = dict(reference.named_parameters())
    for each in of_text:
        values = (stored[each] / 0.02).to(torch.float8_e4m3fn)
        stored |= {each: values, f"{each}_scale": torch.tensor(0.02)}
        layer = each[each.index("layers.") :]
        [loaded] = [n for n in parameters if n.endswith("." + layer) and "vis" not in n]
        parameters[loaded].data = values.float() * 0.02
    assert len(of_text) >= 14
    shutil.copytree(model.directory, tmp_path / "fp8")
    save_file(stored, tmp_path / "fp8/model.safetensors")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    tokens = text(prompt, 13) + shown(count) + text(prompt, 20)
    images = [encoder_input(1, 13, num_tokens=count)]
    engine = driver(tmp_path / "fp8", dtype="float32")
    engine.start(0, tokens, images=images)
    expected = Checkpoint(tmp_path, reference).logits_with_images(tokens, images)
    assert (engine.logits({0: len(tokens)}) - expected).abs().max() < 1e-3
