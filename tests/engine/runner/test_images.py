"""Sequences that show images are computed as transformers computes them, in any steps."""

import pytest
import torch

from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.images import encoder_input, pixel_values
from tests.engine.tiny_models import IMAGE_TOKEN

TOKENS = {"smolvlm": 4, "idefics3": 16}
NAMES = list(TOKENS)


def text(prompt: MakePrompt, length: int) -> list[int]:
    return [token % 250 for token in prompt(length)]


def shown(count: int) -> list[int]:
    return [IMAGE_TOKEN] * count


@pytest.mark.parametrize("chunks", [(90,), (12, 3, 2, 1, 1, 71), (1,) * 90])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_prompt_with_images_agree(
    name: str,
    chunks: tuple[int, ...],
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
) -> None:
    model, count = checkpoint(name), TOKENS[name]
    tokens = text(prompt, 13) + shown(2 * count) + text(prompt, 77 - 3 * count) + shown(count)
    first = encoder_input(1, 13, num_tokens=count)
    second = encoder_input(2, 13 + count, num_tokens=count)
    again = encoder_input(1, 90 - count, num_tokens=count)
    images = [first, second, again]
    engine = driver(model.directory)
    engine.start(3, tokens, images=images)
    logits = torch.cat([engine.logits({3: chunk}) for chunk in chunks])
    expected = model.logits_with_images(tokens, pixel_values(*images))
    assert (logits - expected).abs().max() < 1e-3
    without = model.logits(tokens)
    assert (logits[13:] - without[13:]).abs().max() > 0.1, "images make a difference"


def test_batches_mix_sequences_with_images_and_without(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("smolvlm")
    seen = text(prompt, 9) + shown(4) + text(prompt, 20)
    plain = text(prompt, 31)
    images = {slot: [encoder_input(slot, 9, num_tokens=4)] for slot in (0, 2)}
    engine = driver(model.directory)
    engine.start(0, seen, images=images[0])
    engine.start(1, plain)
    engine.start(2, seen, images=images[2])
    logits = engine.logits({0: 33, 1: 31, 2: 33})
    for slot, part in zip((0, 2), (logits[:33], logits[64:]), strict=True):
        expected = model.logits_with_images(seen, pixel_values(*images[slot]))
        assert (part - expected).abs().max() < 1e-3
    assert (logits[33:64] - model.logits(plain)).abs().max() < 1e-3


def test_a_slot_shows_nothing_of_the_sequence_before(
    checkpoint: SaveModel, driver: LoadDriver, prompt: MakePrompt
) -> None:
    model = checkpoint("smolvlm")
    engine = driver(model.directory)
    tokens = text(prompt, 9) + shown(4)
    engine.start(0, tokens, images=[encoder_input(1, 9, num_tokens=4)])
    engine.prefill(0)
    engine.start(0, tokens)
    assert (engine.logits({0: 13}) - model.logits(tokens)).abs().max() < 1e-3
