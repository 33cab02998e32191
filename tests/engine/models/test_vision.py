"""Vision encoders agree with transformers, and configs of models that see are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.models.formats.files import CheckpointError
from engine.models.hf_config import parse_spec, read_spec
from engine.models.spec import UnsupportedModel
from engine.models.vision.siglip import VisionEncoder, load_vision, read_normalization
from engine.shared.config import ModelConfig
from tests.engine.fixtures import SaveModel
from tests.engine.images import encoder_input, pixel_values
from tests.engine.tiny_models import IMAGE_TOKEN

CPU = torch.device("cpu")
TEXT = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


def encoder_of(directory: Path, **settings: Any) -> VisionEncoder:
    model = ModelConfig(model=str(directory), **settings)
    return load_vision(directory, read_spec(directory), model, torch.float32, CPU)


def given(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "text_config": TEXT,
        "vision_config": {"image_size": 32, "patch_size": 4},
        "scale_factor": 4,
        "image_token_id": 7,
        **changes,
    }


@pytest.mark.parametrize("side", [32, 16])
@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_embeddings_of_images_agree(name: str, side: int, checkpoint: SaveModel) -> None:
    model = checkpoint(name)
    encoder = encoder_of(model.directory)
    image = encoder_input(1, 0, num_tokens=0, side=side)
    embeddings = encoder.encode(image.pixels, side, side)
    with torch.inference_mode():
        features = model.reference.model.get_image_features(pixel_values(image)[None])
    expected = features.pooler_output[0]
    assert len(embeddings) == encoder.spec.num_tokens(side, side)
    assert (embeddings - expected).abs().max() < 1e-3


def test_what_the_encoder_takes_is_read_from_the_config(checkpoint: SaveModel) -> None:
    vision = read_spec(checkpoint("smolvlm").directory).vision
    assert vision is not None
    assert (vision.token_id, vision.max_tokens) == (IMAGE_TOKEN, 4)
    sizes = [(32, 32), (16, 16), (16, 32), (24, 24), (48, 48), (0, 0)]
    assert [vision.num_tokens(*size) for size in sizes] == [4, 1, 0, 0, 0, 0]


def test_configs_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="text_config of model_type 'qwen2'"):
        parse_spec(given(text_config={**TEXT, "model_type": "qwen2"}), {})
    with pytest.raises(UnsupportedModel, match="image_size 36 is no multiple of patch_size 4 tim"):
        parse_spec(given(vision_config={"image_size": 36, "patch_size": 4}), {})
    with pytest.raises(UnsupportedModel, match="num_channels"):
        parse_spec(given(vision_config={"num_channels": 1}), {})


def test_pixels_are_normalized_as_the_files_say(tmp_path: Path) -> None:
    assert read_normalization(tmp_path).deviation == (0.5, 0.5, 0.5)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"rescale_factor": 0.5, "image_mean": [1, 2, 3]}))
    read = read_normalization(tmp_path)
    assert (read.scale, read.mean, read.deviation) == (0.5, (1, 2, 3), (0.5, 0.5, 0.5))
    path.write_text(json.dumps({"do_normalize": False, "do_rescale": False}))
    read = read_normalization(tmp_path)
    assert (read.scale, read.mean, read.deviation) == (1, (0, 0, 0), (1, 1, 1))
    path.write_text(json.dumps({"image_mean": "grey"}))
    with pytest.raises(UnsupportedModel, match="preprocessor_config"):
        read_normalization(tmp_path)


def test_weights_that_do_not_fit_are_refused(checkpoint: SaveModel) -> None:
    directory = checkpoint("smolvlm").directory
    spec = read_spec(directory)
    assert spec.vision is not None
    wider = replace(spec, vision=replace(spec.vision, hidden_size=64))
    model = ModelConfig(model=str(directory))
    with pytest.raises(CheckpointError, match=r"patch_embedding.weight has shape \[48, 3, 4, 4\]"):
        load_vision(directory, wider, model, torch.float32, CPU)


def test_random_weights_need_no_files(checkpoint: SaveModel) -> None:
    directory = checkpoint("smolvlm").directory
    image = encoder_input(1, 0, num_tokens=4)
    first, second = (
        encoder_of(directory, load_format="dummy", seed=seed).encode(image.pixels, 32, 32)
        for seed in (1, 2)
    )
    assert first.shape == second.shape == (4, 64)
    assert not torch.equal(first, second)
