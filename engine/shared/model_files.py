"""Where a model's files are: a directory, a GGUF file, or a download from the Hugging Face hub."""

from pathlib import Path

from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME, ModelConfig
from engine.shared.gguf.directory import is_gguf, text_directory
from engine.shared.gguf.reader import BadGguf

_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_WEIGHT_FILES = ["*/*.safetensors"]
"""Some repositories have the weights once more, in a folder and in a form for other programs."""


class ModelNotFound(ValueError):
    """The model setting names neither a directory nor a repository that can be fetched."""


def model_directory(config: ModelConfig, *, weights: bool) -> Path:
    """Return the local directory of the model, downloading what is missing.

    Of a GGUF file this is a directory with everything but the weights.

    Args:
        config: names a directory or a hub id.
        weights: also fetch the safetensors (front ends need only the text files).

    Raises:
        ModelNotFound: with a message that says what to do.
    """
    local = Path(config.model).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelNotFound(
                f"{local} has no config.json: is it a Hugging Face model directory?"
            )
        return local
    if is_gguf(config.model):
        try:
            return text_directory(local)
        except (BadGguf, OSError) as error:
            raise ModelNotFound(str(error)) from error
    if config.model.startswith((".", "/", "~")) or config.model.count("/") != 1:
        raise ModelNotFound(
            f"model {config.model!r} is neither a directory nor a hub id like 'org/name', nor is "
            "there a .gguf file"
        )
    from huggingface_hub import snapshot_download  # slow to import and needed for hub ids only

    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                allow_patterns=patterns,
                ignore_patterns=_OTHER_WEIGHT_FILES,
            )
        )
    except Exception as error:
        raise ModelNotFound(
            f"model {config.model!r} is not a directory and could not be fetched from the hub: "
            f"{error}"
        ) from error


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names by which clients may call the model, the preferred one first."""
    if config.served_model_name:
        return config.served_model_name
    local = Path(config.model).expanduser()
    if local.resolve() == BUNDLED_MODEL.resolve():  # also by a link to it
        return (BUNDLED_MODEL_NAME,)
    if is_gguf(config.model):
        return (local.stem,)
    return (local.resolve().name,) if local.is_dir() else (config.model,)
