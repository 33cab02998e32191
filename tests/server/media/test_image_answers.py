"""A picture sent over HTTP yields the same tokens as transformers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from swell import AsyncLLM
from tests.engine.tiny_models import IMAGE_TOKEN
from tests.server.media.pictures import data_url, encoded, picture
from tests.server.media.vision_models import (
    GEMMA3,
    INTERNVL,
    LLAVA,
    MISTRAL3,
    NUM_TOKENS,
    QWEN,
    QWEN_IMAGE,
    SETTINGS,
    save_vision_model,
    small_tokenizer,
)

QUESTION = "what is this"


def idefics3_inputs(name: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return a conversation as preprocessed by transformers' processor."""
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(small_tokenizer().to_str())
    )
    theirs: Any = Idefics3Processor(
        Idefics3ImageProcessorPil(**SETTINGS), fast, image_seq_len=NUM_TOKENS[name]
    )
    text = f"User:<image><image>{QUESTION}<end_of_utterance>\nAssistant:"
    taken = theirs(images=[shown], text=text, return_tensors="pt")
    return {name: taken[name] for name in ("input_ids", "pixel_values")}


def qwen_inputs(_: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the same of Qwen's, whose prompts repeat a token."""
    theirs: Any = Qwen2VLImageProcessorPil(**QWEN)
    taken = theirs(shown, return_tensors="pt")
    images = "".join(
        QWEN_IMAGE.replace("<|image_pad|>", "<|image_pad|>" * int(grid.prod() // 4))
        for grid in taken["image_grid_thw"]
    )
    text = f"User:{images}{QUESTION}<end_of_utterance>\nAssistant:"
    tokens = torch.tensor([small_tokenizer("<|image_pad|>").encode(text).ids])
    return {**taken, "input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE_TOKEN).int()}


def gemma3_inputs(_: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the same of Gemma's."""
    theirs: Any = Gemma3ImageProcessorPil(**{**GEMMA3, "do_normalize": True})
    taken = theirs(shown, return_tensors="pt")
    image = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    text = f"User:{image * len(shown)}{QUESTION}<end_of_utterance>\nAssistant:"
    tokens = torch.tensor([small_tokenizer("<image_soft_token>").encode(text).ids])
    return {
        "input_ids": tokens,
        "pixel_values": taken["pixel_values"],
        "token_type_ids": (tokens == IMAGE_TOKEN).int(),
    }


def mistral3_inputs(_: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the same of Mistral 3's, whose rows end with text."""
    theirs: Any = PixtralImageProcessorPil(**MISTRAL3, patch_size={"height": 8, "width": 8})
    taken = theirs(shown, return_tensors="pt")
    images = [
        "[IMG_BREAK]".join(["[IMG]" * (width // 8)] * (height // 8)) + "[IMG_END]"
        for height, width in taken["image_sizes"].tolist()
    ]
    return {**taken, "input_ids": asked("".join(images), "[IMG]")}


def llava_inputs(_: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the same of LLaVA's."""
    taken = CLIPImageProcessorPil(**LLAVA)(shown, return_tensors="pt")
    return {**taken, "input_ids": asked("<image>" * 16 * len(shown), "<image>")}


def internvl_inputs(_: str, shown: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the same of InternVL's, which has tiles."""
    theirs: Any = GotOcr2ImageProcessorPil(**INTERNVL, crop_to_patches=True)
    taken = theirs(shown, return_tensors="pt")
    images = [f"<img>{'<IMG_CONTEXT>' * 16 * count}</img>" for count in taken["num_patches"]]
    return {
        "pixel_values": taken["pixel_values"],
        "input_ids": asked("".join(images), "<IMG_CONTEXT>"),
    }


def asked(images: str, token: str) -> torch.Tensor:
    text = f"User:{images}{QUESTION}<end_of_utterance>\nAssistant:"
    return torch.tensor([small_tokenizer(token).encode(text).ids])


@pytest.mark.parametrize(
    ("name", "inputs", "shape"),
    [
        ("smolvlm", idefics3_inputs, (32, 32)),
        ("idefics3", idefics3_inputs, (40, 20)),
        ("qwen2-vl", qwen_inputs, (32, 32)),
        ("qwen2.5-vl", qwen_inputs, (40, 20)),
        ("gemma3-vision", gemma3_inputs, (32, 32)),
        ("gemma3-vision", gemma3_inputs, (40, 20)),
        ("mistral3", mistral3_inputs, (32, 32)),
        ("mistral3", mistral3_inputs, (70, 20)),
        ("llava", llava_inputs, (40, 20)),
        ("internvl", internvl_inputs, (90, 60)),
    ],
)
def test_answer_about_image_equals_transformers(
    tmp_path: Path,
    name: str,
    inputs: Callable[[str, list[Image.Image]], dict[str, torch.Tensor]],
    shape: tuple[int, int],
) -> None:
    model = save_vision_model(name, tmp_path)
    shown = [picture(*shape, seed=seed) for seed in (0, 1)]
    taken = inputs(name, shown)
    with torch.inference_mode():
        generated = model.reference.generate(
            **{**taken, "pixel_values": taken["pixel_values"].float()},
            attention_mask=torch.ones_like(taken["input_ids"]), do_sample=False, max_new_tokens=8,
            eos_token_id=None,
        )  # fmt: skip
    prompt = taken["input_ids"][0].tolist()
    expected = generated[0].tolist()[len(prompt) :]

    async def answers() -> list[Any]:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(encoded(each))}} for each in shown
        ]
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        asked: dict[str, Any] = {
            "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with await AsyncLLM.start(
            tmp_path, dtype="float32", max_model_len=256, num_kv_blocks=64, block_size=16,
            max_num_batched_tokens=32, max_num_seqs=8,
        ) as served:  # fmt: skip
            return [await served.chat(messages, **asked) for _ in range(2)]

    first, second = asyncio.run(answers())
    assert first.prompt_token_ids == prompt
    assert first.choices[0].token_ids == expected
    assert second.choices[0].token_ids == expected
    assert second.usage.prompt_tokens_details.cached_tokens > 0
