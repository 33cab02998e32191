"""Images and their placeholder texts match the models' own processors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from server.media.processors import BadProcessor, ImageProcessor, image_processor
from tests.server.media.pictures import picture

SHAPES = [
    (64, 64), (1, 1), (33, 70), (70, 33), (128, 64), (200, 9), (9, 200), (131, 67), (300, 301),
]  # fmt: skip

IDEFICS3: dict[str, Any] = {
    "size": {"longest_edge": 128},
    "max_image_size": {"longest_edge": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA3: dict[str, Any] = {"size": {"height": 56, "width": 56}}
QWEN: dict[str, Any] = {
    "patch_size": 4, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 96 * 96,
}  # fmt: skip


def processor(
    directory: Path, model_type: str, settings: dict[str, Any], **config: Any
) -> ImageProcessor:
    """Return the processor of a model with these files."""
    config = {
        "model_type": model_type,
        "vision_config": {"image_size": 32, "patch_size": 8},
    } | config
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    found = image_processor(directory)
    assert found is not None
    return found


def prepared(own: ImageProcessor, image: Image.Image) -> list[np.ndarray]:
    """Return the encoder inputs as bytes, checked against the plan."""
    arrays = [np.asarray(each) for each in own.pixels(image)]
    sizes = own.plan(image.height, image.width).sizes
    assert [array.shape for array in arrays] == [(s.height, s.width, 3) for s in sizes]
    return arrays


def normalized(array: np.ndarray, theirs: Any) -> np.ndarray:
    """Return pixels in the encoder's layout: [channels, rows, columns]."""
    scaled = (array / 255.0 - np.array(theirs.image_mean)) / np.array(theirs.image_std)
    return np.moveaxis(scaled, -1, 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_tiles_equal_idefics3(
    tmp_path: Path, shape: tuple[int, int], splits: bool, kind: str
) -> None:
    settings = {**IDEFICS3, "do_image_splitting": splits}
    own = processor(tmp_path, kind, settings)
    theirs: Any = Idefics3ImageProcessorPil(**settings)
    image = picture(*shape)
    expected = np.asarray(theirs(image, return_row_col_info=True)["pixel_values"])[0]
    found = np.stack([normalized(array, theirs) for array in prepared(own, image)])
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_resized_like_gemma3(tmp_path: Path, shape: tuple[int, int]) -> None:
    own, theirs = processor(tmp_path, "gemma3", GEMMA3), Gemma3ImageProcessorPil(**GEMMA3)
    image = picture(*shape)
    expected = np.asarray(theirs(image)["pixel_values"])[0]
    np.testing.assert_allclose(normalized(prepared(own, image)[0], theirs), expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_resized_like_qwen(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    own, theirs = processor(tmp_path, kind, QWEN), Qwen2VLImageProcessorPil(**QWEN)
    image = picture(*shape)
    output = theirs(image)
    (array,) = prepared(own, image)
    patches, *_ = theirs.patchify(normalized(array, theirs), 4, 2, 2)
    np.testing.assert_allclose(patches, output["pixel_values"], atol=1e-3)
    grid = np.asarray(output["image_grid_thw"])[0]
    assert own.plan(image.height, image.width).num_tokens == grid.prod() // 4


def fast(backend: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with named tokens."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(backend.to_str()), extra_special_tokens=special
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_image_prompt_equals_idefics3(
    tmp_path: Path, backend: Tokenizer, shape: tuple[int, int]
) -> None:
    own = processor(tmp_path, "idefics3", {**IDEFICS3, "image_seq_len": 5})
    tokens = fast(backend, global_image_token="<global-img>", first="<row_1_col_1>")
    theirs = Idefics3Processor(Idefics3ImageProcessorPil(**IDEFICS3), tokens, image_seq_len=5)
    image = picture(*shape)
    expected = theirs(images=[image], text="hello\n<image> world")["input_ids"][0]
    text = f"hello\n{own.plan(image.height, image.width).text} world"
    assert tokens(text)["input_ids"] == expected


def test_image_prompt_equals_gemma3(tmp_path: Path, backend: Tokenizer) -> None:
    own = processor(tmp_path, "gemma3", GEMMA3, mm_tokens_per_image=7)
    tokens = fast(
        backend,
        boi_token="<start_of_image>",
        image_token="<image_soft_token>",
        eoi_token="<end_of_image>",
    )
    theirs = Gemma3Processor(Gemma3ImageProcessorPil(**GEMMA3), tokens, image_seq_length=7)
    expected = theirs(images=[picture(9, 7)], text="hello\n<start_of_image> world")["input_ids"][0]
    assert tokens(f"hello\n{own.plan(9, 7).text} world")["input_ids"] == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "side"), [("mistral3", 8), ("llava", 4)])
def test_rows_and_columns_equal_pixtral(
    tmp_path: Path, kind: str, side: int, shape: tuple[int, int]
) -> None:
    settings: dict[str, Any] = {"size": {"longest_edge": 96}}
    vision = {"model_type": "pixtral", "patch_size": 4}
    own = processor(tmp_path, kind, settings, vision_config=vision, spatial_merge_size=2)
    theirs: Any = PixtralImageProcessorPil(**settings, patch_size={"height": side, "width": side})
    image = picture(*shape)
    output = theirs(image)
    [(height, width)] = output["image_sizes"]
    plan = own.plan(*shape)
    row = "[IMG]" * (width // side)
    assert plan.text == f"{row}[IMG_BREAK]" * (height // side - 1) + f"{row}[IMG_END]"
    assert plan.runs == (width // side,) * (height // side)
    (array,) = prepared(own, image)
    np.testing.assert_allclose(
        normalized(array, theirs), np.asarray(output["pixel_values"])[0], atol=1e-3
    )


def test_a_line_of_pixels_is_a_token_of_mistral3(tmp_path: Path) -> None:
    # transformers' processor makes it an image without rows.
    vision = {"model_type": "pixtral", "patch_size": 4}
    own = processor(tmp_path, "mistral3", {"size": {"longest_edge": 96}}, vision_config=vision)
    assert own.plan(1, 200).runs == (12,)
    assert prepared(own, picture(1, 200))[0].shape == (8, 96, 3)


CUT = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("vision", "strategy", "processor_class", "settings"),
    [
        ("clip_vision_model", "default", CLIPImageProcessorPil, CUT),
        ("clip_vision_model", "default", LlavaImageProcessorPil, CUT),
        ("siglip_vision_model", "full", SiglipImageProcessorPil, {"size": CUT["crop_size"]}),
    ],
    ids=["CLIP", "LLaVA", "SigLIP"],
)
def test_image_squares_equal_llava(
    tmp_path: Path,
    shape: tuple[int, int],
    vision: str,
    strategy: str,
    processor_class: Any,
    settings: dict[str, Any],
) -> None:
    theirs = processor_class(**settings)
    own = processor(
        tmp_path,
        "llava",
        settings,
        vision_config={"image_size": 32, "patch_size": 8, "model_type": vision},
        vision_feature_select_strategy=strategy,
    )
    image = picture(*shape)
    assert own.plan(*shape).text == "<image>" * 16
    expected = np.asarray(theirs(image)["pixel_values"])[0]
    np.testing.assert_allclose(normalized(prepared(own, image)[0], theirs), expected, atol=1e-3)


@pytest.mark.parametrize("shape", [*SHAPES, (448, 448)], ids=str)
def test_tiles_equal_internvl(tmp_path: Path, shape: tuple[int, int]) -> None:
    settings: dict[str, Any] = {"size": {"height": 32, "width": 32}, "max_patches": 6}
    own = processor(tmp_path, "internvl", settings, image_seq_length=4)
    theirs: Any = GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)
    image = picture(*shape)
    output = theirs(image)
    arrays = prepared(own, image)
    assert len(arrays) == output["num_patches"][0]
    found = np.stack([normalized(array, theirs) for array in arrays])
    np.testing.assert_allclose(found, np.stack(output["pixel_values"]), atol=1e-3)
    assert own.plan(*shape).text == f"<img>{'<IMG_CONTEXT>' * 4 * len(arrays)}</img>"


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": {"model_type": "clip_vision_model"}, "settings": {"size": {"height": 9}}},
        {"vision_feature_select_strategy": "full"},
        {"vision_config": {"model_type": "vit"}},
        {"settings": {**CUT, "do_center_crop": False}},
        {"settings": {**CUT, "do_pad": True}},
        {"settings": {**CUT, "size": {"shortest_edge": 16}}},
    ],
    ids=str,
)
def test_unknown_llavas_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    settings = config.pop("settings", CUT)
    with pytest.raises(BadProcessor):
        processor(tmp_path, "llava", settings, **config)


def test_processor_settings_can_be_in_one_shared_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": IDEFICS3, "image_seq_len": 3})
    )
    own = processor(tmp_path, "smolvlm", {})
    assert own.plan(64, 64).sizes == ((32, 32, 3),) * 17


def test_tokens_per_tile_default_to_network_config(tmp_path: Path) -> None:
    assert processor(tmp_path, "idefics3", IDEFICS3).plan(8, 8).sizes[0].num_tokens == 4


def test_token_counts_of_published_models_are_as_expected(tmp_path: Path) -> None:
    smolvlm = {
        "size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512},
        "image_seq_len": 64,
    }  # fmt: skip
    assert processor(tmp_path, "smolvlm", smolvlm).plan(750, 1000).num_tokens == 832
    qwen = processor(tmp_path, "qwen2_5_vl", {"min_pixels": 3136, "max_pixels": 12845056})
    assert qwen.plan(750, 1000).num_tokens == 972


@pytest.mark.parametrize(
    "settings",
    [{"do_resize": False}, {"do_pan_and_scan": True}, {"size": {"longest_edge": 5}}, {"size": 3}],
)
def test_unknown_processors_are_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(BadProcessor):
        processor(tmp_path, "gemma3", settings)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "gemma3"}])
def test_text_model_has_no_image_processor(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_processor(tmp_path) is None
