"""What a model's authors recommend for fields that requests leave open."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

NEUTRAL = ("vllm", "none")
"""Settings that leave the model's recommendation out."""


class BadGenerationConfig(ValueError):
    """The file with the recommended parameters is missing or wrong."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of requests that do not name them; fields are those of generation_config.json."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: int = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens to generate where a request names no limit."""


def read_sampling_defaults(model: Path, source: str) -> SamplingDefaults:
    """Return the defaults that `--generation-config` asks for.

    Args:
        model: the served model's directory.
        source: "auto" reads generation_config.json there, if there is one; "vllm" or "none"
            recommends nothing; anything else is the directory to read it from.

    Raises:
        BadGenerationConfig: there is no such directory or file, or it cannot be used.
    """
    if source in NEUTRAL:
        return SamplingDefaults()
    directory = model if source == "auto" else Path(source).expanduser()
    path = directory / "generation_config.json"
    if not path.is_file():
        if source == "auto":
            return SamplingDefaults()
        raise BadGenerationConfig(f"--generation-config: there is no {path}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        named = {name: value for name, value in values.items() if value is not None}
        return msgspec.convert(named, SamplingDefaults)
    except (OSError, ValueError, AttributeError) as error:
        raise BadGenerationConfig(f"{path} cannot be used: {error}") from error
