"""Converts a Hugging Face checkpoint's `config.json` to a frozen spec.

The model's family determines which keys matter, and what they mean.
"""

from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from engine.models.families.config import check_unread, with_defaults
from engine.models.families.registry import architecture_of, family_of
from engine.models.formats.quantized_scheme import read_scheme
from engine.models.spec import (
    DtypeName,
    ModelSpec,
    QwenVisionSpec,
    SiglipSpec,
    UnsupportedModel,
)
from engine.shared.end_tokens import end_token_ids, named_end_tokens

_DTYPES: tuple[str, ...] = get_args(DtypeName)


def read_spec(directory: Path) -> ModelSpec:
    """Read `config.json` of a model directory, and end tokens from all files that define them.

    Raises:
        UnsupportedModel: names the unsupported or missing setting.
    """
    config, generation = read_config(directory), read_generation(directory)
    spec = parse_spec(config, generation)
    text = {**config, **(config.get("text_config") or {})}
    ends = end_token_ids(directory, text, generation)
    known = tuple([each for each in ends if each < spec.vocab_size])
    vision = spec.vision
    if vision is not None and not isinstance(vision, SiglipSpec):
        images = read_image_settings(directory)
        size = images.get("size")
        longest = size.get("longest_edge") if isinstance(size, dict) else None
        if isinstance(vision, QwenVisionSpec):
            pixels = images.get("max_pixels") or longest or vision.max_pixels
            vision = msgspec.structs.replace(vision, max_pixels=int(pixels))
        elif not vision.is_square:
            side = int(longest or vision.image_size)
            vision = msgspec.structs.replace(vision, image_size=side)
    return msgspec.structs.replace(spec, eos_token_ids=known, vision=vision)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the decoded `config.json` of a model directory.

    Raises:
        UnsupportedModel: it is not a JSON object.
    """
    return _read_json(directory / "config.json")


def read_generation(directory: Path) -> dict[str, Any]:
    """Return the decoded `generation_config.json` of a model directory; empty without one.

    Raises:
        UnsupportedModel: it is not a JSON object.
    """
    generation = directory / "generation_config.json"
    return _read_json(generation) if generation.is_file() else {}


def read_image_settings(directory: Path) -> dict[str, Any]:
    """Return the image preprocessing settings of a model directory.

    Raises:
        UnsupportedModel: a file is not a JSON object.
    """
    config, image_config = (
        _read_json(path) if (path := directory / f"{name}_config.json").is_file() else {}
        for name in ("processor", "preprocessor")
    )
    return {**(config.get("image_processor") or {}), **image_config}


def parse_spec(config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    """Convert the decoded JSON files to a spec.

    Raises:
        UnsupportedModel: names the unsupported or missing setting.
    """
    architecture = architecture_of(config)
    scheme = read_scheme(config)  # refuses unsupported quantization
    text_config = config.get("text_config") or config
    values = {**config, **text_config, "architectures": [architecture]}
    family = family_of(architecture)
    keys_of = family.reads_as or architecture
    text = with_defaults(keys_of, values)
    spec = family.spec(text)
    check_unread(keys_of, text_config, text, family.ignored)
    if scheme is not None and scheme.method == "mxfp4" and not (spec.moe and spec.moe.is_mxfp4):
        raise UnsupportedModel(
            f"the checkpoint is quantized (mxfp4), which is not supported for {architecture}"
        )
    return msgspec.structs.replace(
        spec,
        eos_token_ids=named_end_tokens(text, generation),
        dtype=_dtype(text),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _dtype(config: dict[str, Any]) -> DtypeName | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    if name not in _DTYPES:
        raise UnsupportedModel(f"config.json: dtype {name!r} is not supported; use --dtype")
    return cast("DtypeName", name)
