"""Vision encoders agree with transformers, and configs of vision models are read."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine.models.formats.files import CheckpointError
from engine.models.hf_config import parse_spec, read_spec
from engine.models.settings import open_checkpoint
from engine.models.spec import QwenVisionSpec, SiglipSpec, TowerSpec, UnsupportedModel
from engine.models.vision.loading import VisionEncoder, has_vision, load_vision
from engine.models.vision.pixels import Normalization, read_normalization
from engine.shared.config import ModelConfig
from tests.engine.fixtures import SaveModel
from tests.engine.images import encoder_input
from tests.engine.tiny_models import IMAGE_TOKEN
from tests.engine.transformers_images import shown_to

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


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smolvlm", (32, 32)),
        ("smolvlm", (16, 16)),
        ("idefics3", (32, 32)),
        ("idefics3", (16, 16)),
        ("qwen2-vl", (32, 32)),
        ("qwen2-vl", (24, 40)),
        ("qwen2-vl", (8, 120)),
        ("qwen2.5-vl", (32, 32)),
        ("qwen2.5-vl", (24, 40)),
        ("qwen2.5-vl", (8, 8)),
        ("qwen2.5-vl", (8, 120)),
        ("gemma3-vision", (32, 32)),
        ("mistral3", (32, 32)),
        ("mistral3", (16, 24)),
        ("mistral3", (8, 8)),
        ("llava", (32, 32)),
        ("llava-siglip", (32, 32)),
        ("llava-pixtral", (24, 32)),
        ("llava-pixtral", (8, 8)),
        ("internvl", (32, 32)),
    ],
)
def test_image_embeddings_agree_with_transformers(
    name: str, sizes: tuple[int, int], checkpoint: SaveModel
) -> None:
    model, (height, width) = checkpoint(name), sizes
    encoder = encoder_of(model.directory)
    image = encoder_input(1, 0, num_tokens=0, side=height, width=width)
    embeddings = encoder.encode(image.pixels, height, width)
    with torch.inference_mode():
        # Twice, because transformers cannot encode a single token of Mistral 3.
        given = shown_to(model.reference, [image, image])
        features = model.reference.model.get_image_features(**given)
    expected = features.pooler_output[0][: len(embeddings)]
    assert len(embeddings) == prod(encoder.spec.grid(height, width))
    assert (embeddings - expected).abs().max() < 1e-3


def test_image_input_format_is_read_from_config(checkpoint: SaveModel) -> None:
    vision = read_spec(checkpoint("smolvlm").directory).vision
    assert vision is not None
    assert (vision.token_id, vision.max_tokens) == (IMAGE_TOKEN, 4)
    sizes = [(32, 32), (16, 16), (16, 32), (24, 24), (48, 48), (0, 0)]
    assert [vision.num_tokens(*size) for size in sizes] == [4, 1, 0, 0, 0, 0]


def test_unsupported_configs_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="text_config of model_type 'qwen2'"):
        parse_spec(given(text_config={**TEXT, "model_type": "qwen2"}), {})
    with pytest.raises(UnsupportedModel, match="image_size 36 is not a multiple of patch_size 4"):
        parse_spec(given(vision_config={"image_size": 36, "patch_size": 4}), {})
    with pytest.raises(UnsupportedModel, match="num_channels"):
        parse_spec(given(vision_config={"num_channels": 1}), {})


QWEN_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000,
    "max_window_layers": 70, "model_type": "qwen2_5_vl", "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}  # fmt: skip


def test_published_qwen_config_is_read(caplog: pytest.LogCaptureFixture) -> None:
    found = parse_spec(QWEN_3B, {})
    assert not caplog.records
    assert found.tie_word_embeddings
    assert found.qkv_bias
    assert found.windows == (None,) * 36
    (rope,) = found.distinct_ropes
    assert (rope.kind, rope.theta, rope.sections) == ("default", 1e6, (16, 24, 24))
    vision = found.vision
    assert vision is not None
    assert (vision.token_id, vision.max_tokens) == (151655, 1280)
    sizes = [(28, 28), (756, 1008), (28, 14), (1036, 1036), (28, 5600)]
    assert [vision.num_tokens(*size) for size in sizes] == [1, 972, 0, 0, 200]
    stretched = {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24],
                 "original_max_position_embeddings": 32768}  # fmt: skip
    (rope,) = parse_spec({**QWEN_3B, "rope_scaling": stretched}, {}).distinct_ropes
    assert (rope.kind, rope.factor, rope.sections) == ("yarn", 4.0, (16, 24, 24))


QWEN2_2B: dict[str, Any] = {
    **QWEN_3B,
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 32768,
    "max_window_layers": 28, "num_attention_heads": 12, "num_hidden_layers": 28,
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16,
        "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}  # fmt: skip


def test_published_qwen2_vl_config_is_read(caplog: pytest.LogCaptureFixture) -> None:
    found = parse_spec(QWEN2_2B, {})
    assert not caplog.records
    assert found.distinct_ropes[0].sections == (16, 24, 24)
    vision = found.vision
    assert isinstance(vision, QwenVisionSpec)
    assert (vision.hidden_size, vision.intermediate_size) == (1280, 5120)
    assert (vision.activation, vision.full_attention_layers) == ("quick_gelu", tuple(range(32)))
    assert vision.num_tokens(756, 1008) == 972
    other = {**QWEN2_2B["vision_config"], "hidden_size": 1280}
    with pytest.raises(UnsupportedModel, match="json: hidden_size 1280 of vision_config is not"):
        parse_spec({**QWEN2_2B, "vision_config": other}, {})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "three numbers"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}},
            "does not add up to half",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"hidden_size": 4096, "num_attention_heads": 32}, "out_hidden_size 2048 of vision_config"),
        ({"vision_config": {"out_hidden_size": 2048, "in_chans": 1}}, "in_channels"),
        ({"vision_config": {"out_hidden_size": 2048, "window_size": 14}}, "window_size 14 is less"),
    ],
)
def test_unsupported_qwen_configs_are_refused_by_name(
    changes: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(UnsupportedModel, match=refusal):
        parse_spec({**QWEN_3B, **changes}, {})


def test_largest_qwen_image_equals_that_of_its_processor(checkpoint: SaveModel) -> None:
    directory = checkpoint("qwen2.5-vl").directory
    vision = read_spec(directory).vision
    assert vision is not None
    # Of 32 x 32 pixels, or as long as an image may be that is as narrow as a token.
    assert vision.max_tokens == 56
    assert [vision.num_tokens(*size) for size in ((8, 448), (8, 456), (64, 64))] == [56, 0, 0]


GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_published_gemma_3_config_is_read(caplog: pytest.LogCaptureFixture) -> None:
    vision = parse_spec(GEMMA3_4B, {}).vision
    assert not caplog.records
    assert isinstance(vision, SiglipSpec)
    assert (vision.token_id, vision.scale_factor, vision.is_bidirectional) == (262144, 4, True)
    assert (vision.max_tokens, vision.num_tokens(896, 896)) == (256, 256)
    with pytest.raises(UnsupportedModel, match="mm_tokens_per_image 250 does not match images"):
        parse_spec({**GEMMA3_4B, "mm_tokens_per_image": 250}, {})


LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100,
    "image_token_index": 32000, "model_type": "llava", "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
        "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "tie_word_embeddings": False, "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
        "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
MISTRAL_24B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
        "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
INTERNVL_1B: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5,
    "image_seq_length": 256, "image_token_id": 151667, "model_type": "internvl",
    "text_config": {
        "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": 151674,
    },
    "vision_config": {
        "image_size": [448, 448], "model_type": "internvl_vision", "patch_size": [14, 14],
    },
    "vision_feature_select_strategy": "default",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "token_id", "size", "tokens"),
    [
        (LLAVA_7B, 32000, (336, 336), 576),
        (MISTRAL_24B, 10, (756, 1008), 27 * 36 + 26),
        (INTERNVL_1B, 151667, (448, 448), 256),
    ],
    ids=["LLaVA", "Mistral", "InternVL"],
)
def test_published_configs_with_transformers_towers_are_read(
    config: dict[str, Any],
    token_id: int,
    size: tuple[int, int],
    tokens: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vision = parse_spec(config, {}).vision
    assert not caplog.records
    assert isinstance(vision, TowerSpec)
    assert (vision.token_id, vision.num_tokens(*size)) == (token_id, tokens)
    height, width = size
    others = [(height + 7, width), (height, width + 7), (0, 0), (height * 9, width * 9)]
    assert [vision.num_tokens(*each) for each in others] == [0] * 4
    assert vision.max_tokens >= tokens


def test_unsupported_llavas_serve_text_or_are_refused_by_name() -> None:
    assert parse_spec({**LLAVA_7B, "vision_feature_select_strategy": "full"}, {}).vision is None
    with pytest.raises(UnsupportedModel, match="text_config of model_type 'phi3' is not supported"):
        parse_spec({**LLAVA_7B, "text_config": {"model_type": "phi3"}}, {})


def test_towers_whose_weights_do_not_fit_are_refused(checkpoint: SaveModel, tmp_path: Path) -> None:
    saved = checkpoint("mistral3").directory
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    tensors = load_file(saved / "model.safetensors")
    name = "vision_tower.ln_pre.weight"
    for changed in (
        {key: each for key, each in tensors.items() if key != name},
        {**tensors, name: tensors[name][:-1].clone()},
        {**tensors, f"{name}_scale": tensors[name].clone()},
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"ln_pre\.weight.*--language-model-only"):
            encoder_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("qwen2.5-vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("gemma3-vision", {"vision_tower.": "vision_tower.vision_model."}),
        (
            "gemma3-vision",
            {
                "vision_tower.": "model.vision_tower.vision_model.",
                "multi_modal_projector.": "model.multi_modal_projector.",
                "language_model.model.": "model.language_model.",
            },
        ),
    ],
    ids=["Qwen", "Gemma, published", "Gemma, newer"],
)
def test_tensors_are_found_under_alternative_names(
    name: str, names: dict[str, str], checkpoint: SaveModel, tmp_path: Path
) -> None:
    saved = checkpoint(name).directory
    tensors = {
        next((new + key.removeprefix(was) for was, new in names.items() if key.startswith(was)),
             key): tensor
        for key, tensor in load_file(saved / "model.safetensors").items()
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((saved / file).read_bytes())
    open_checkpoint(tmp_path, read_spec(tmp_path), ModelConfig(model=str(tmp_path)))
    image = encoder_input(1, 0, num_tokens=16)
    one, other = (encoder_of(each).encode(image.pixels, 32, 32) for each in (saved, tmp_path))
    assert torch.equal(one, other)


def test_files_can_lack_the_encoder(checkpoint: SaveModel, tmp_path: Path) -> None:
    saved = checkpoint("gemma3-vision").directory
    tensors = load_file(saved / "model.safetensors")
    text = {name: each for name, each in tensors.items() if name.startswith("language_model.")}
    save_file(text, tmp_path / "model.safetensors")
    vision = read_spec(saved).vision
    assert vision is not None
    settings = ModelConfig(model=str(tmp_path))
    assert has_vision(saved, vision, settings)
    assert not has_vision(tmp_path, vision, settings)
    assert has_vision(tmp_path, vision, replace(settings, load_format="dummy"))


def test_pixels_are_normalized_as_configured_in_files(tmp_path: Path) -> None:
    assert read_normalization(tmp_path, Normalization()).deviation == (0.5, 0.5, 0.5)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"rescale_factor": 0.5, "image_mean": [1, 2, 3]}))
    read = read_normalization(tmp_path, Normalization())
    assert (read.scale, read.mean, read.deviation) == (0.5, (1, 2, 3), (0.5, 0.5, 0.5))
    path.write_text(json.dumps({"do_normalize": False, "do_rescale": False}))
    read = read_normalization(tmp_path, Normalization())
    assert (read.scale, read.mean, read.deviation) == (1, (0, 0, 0), (1, 1, 1))
    processor = tmp_path / "processor_config.json"
    processor.write_text(
        json.dumps({"image_processor": {"do_normalize": True, "image_std": [1] * 3}})
    )
    read = read_normalization(tmp_path, Normalization())
    assert read.deviation == (1, 1, 1), "what processors are saved to today is read, too"
    path.write_text(json.dumps({"image_mean": "grey"}))
    with pytest.raises(UnsupportedModel, match="preprocessor_config"):
        read_normalization(tmp_path, Normalization())


def test_weights_that_do_not_fit_are_refused(checkpoint: SaveModel) -> None:
    directory = checkpoint("smolvlm").directory
    spec = read_spec(directory)
    assert spec.vision is not None
    wider = replace(spec, vision=replace(spec.vision, hidden_size=64))
    model = ModelConfig(model=str(directory))
    with pytest.raises(CheckpointError, match=r"patch_embedding.weight has shape \[48, 3, 4, 4\]"):
        load_vision(directory, wider, model, torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smolvlm", 4), ("qwen2-vl", 16), ("qwen2.5-vl", 16), ("gemma3-vision", 16),
        ("mistral3", 16), ("llava", 16), ("internvl", 16),
    ],
)  # fmt: skip
def test_random_weights_need_no_files(name: str, count: int, checkpoint: SaveModel) -> None:
    directory = checkpoint(name).directory
    image = encoder_input(1, 0, num_tokens=count)
    first, second = (
        encoder_of(directory, load_format="dummy", seed=seed).encode(image.pixels, 32, 32)
        for seed in (1, 2)
    )
    assert first.shape == second.shape == (count, 64)
    assert not torch.equal(first, second)
