"""Small random vision models, with all files needed to serve them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.tiny_models import IMAGE_TOKEN, Checkpoint, save_tiny_model_with_vision
from tests.server.media.conftest import TEMPLATE

NORMALIZATION: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.5, 0.5]}
SETTINGS: dict[str, Any] = {
    "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32},
    **NORMALIZATION,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "patch_size": 4, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 48 * 48,
    **NORMALIZATION,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "size": {"height": 32, "width": 32}, "image_seq_length": 16,
    **NORMALIZATION,
}  # fmt: skip
MISTRAL3: dict[str, Any] = {
    "size": {"longest_edge": 32},
    **NORMALIZATION,
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
    **NORMALIZATION,
}  # fmt: skip
INTERNVL: dict[str, Any] = {
    "size": {"height": 32, "width": 32}, "max_patches": 4,
    **NORMALIZATION,
}  # fmt: skip
_OF_TOWERS = {
    "mistral3": (MISTRAL3, "[IMG]"),
    "llava": (LLAVA, "<image>"),
    "internvl": (INTERNVL, "<IMG_CONTEXT>"),
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""The template's text for an image."""


def small_tokenizer(image: str = "<image>") -> Tokenizer:
    """Return a byte-level tokenizer whose image token has the model's id."""
    special = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|eos|>"]
    special += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    special += ["<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>"]
    special += ["[IMG_BREAK]", "[IMG_END]", "<img>", "</img>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: IMAGE_TOKEN - len(special)]
    vocabulary = {text: number for number, text in enumerate([*letters, *special, image])}
    assert vocabulary[image] == IMAGE_TOKEN
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in [*special, image]])
    return tokenizer


def save_vision_model(name: str, directory: Path) -> Checkpoint:
    """Write a model, its processor's settings, its tokenizer and its chat template."""
    model = save_tiny_model_with_vision(name, directory, 3)
    settings, template, tokenizer = SETTINGS, TEMPLATE, small_tokenizer()
    if name in NUM_TOKENS:
        sizes = json.dumps({"image_seq_len": NUM_TOKENS[name]})
        (directory / "processor_config.json").write_text(sizes)
    elif name in _OF_TOWERS:
        settings, image = _OF_TOWERS[name]
        template, tokenizer = TEMPLATE.replace("<image>", image), small_tokenizer(image)
        if name == "internvl":  # unless it is in config.json
            sizes = json.dumps({"image_seq_length": 16})
            (directory / "processor_config.json").write_text(sizes)
    elif name == "gemma3-vision":
        settings, template = GEMMA3, TEMPLATE.replace("<image>", "<start_of_image>")
        tokenizer = small_tokenizer("<image_soft_token>")
    else:
        settings, template = QWEN, TEMPLATE.replace("<image>", QWEN_IMAGE)
        tokenizer = small_tokenizer("<|image_pad|>")
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    return model


NUM_TOKENS = {"smolvlm": 4, "idefics3": 16}
"""Of each tile."""
