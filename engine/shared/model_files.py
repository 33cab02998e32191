"""Locates a model's files: a directory, a GGUF file, or a download from the Hugging Face hub."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME, ModelConfig
from engine.shared.gguf.directory import is_gguf, text_directory
from engine.shared.gguf.reader import BadGguf

_SECONDS_PER_LINE = 2.0
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_WEIGHT_FILES = ["*/*.safetensors"]
"""Some repositories contain a second copy of the weights for other programs in a subfolder."""

_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
"""A repository and the suffix of one of its GGUF files."""


def download_progress() -> type[Any]:
    """Return the progress display of a download: a bar on terminals, otherwise lines."""
    from huggingface_hub.utils.tqdm import tqdm

    class Lines(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "mininterval": _SECONDS_PER_LINE})  # type: ignore[no-untyped-call]

        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            return lambda text: print(text.strip(), file=sys.stderr, flush=True)

    return tqdm if sys.stderr.isatty() else Lines


class ModelNotFound(ValueError):
    """The configured model is neither a directory nor a repository that can be downloaded."""


def model_directory(config: ModelConfig, *, weights: bool) -> Path:
    """Return the local directory of the model, downloading missing files.

    For a GGUF file it contains everything but the weights.

    Args:
        config: names a directory or a hub id.
        weights: also fetch the safetensors (front ends need only the text files).

    Raises:
        ModelNotFound: with an actionable message.
    """
    local = Path(config.model).expanduser()
    _check_rights(local)
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
                tqdm_class=download_progress(),
            )
        )
    except Exception as error:
        raise ModelNotFound(
            f"model {config.model!r} is not a directory and could not be fetched from the hub: "
            + _line(error)
        ) from error


def _check_rights(directory: Path) -> None:
    try:
        inside = list(directory.iterdir()) if directory.is_dir() else []
        denied = next(
            (file for file in inside if not os.access(file, os.R_OK, effective_ids=True)), None
        )
    except PermissionError:
        denied = directory
    if denied is not None:
        raise ModelNotFound(
            f"{denied} cannot be read by user {os.geteuid()} with group {os.getegid()}: run "
            f"`chmod -R a+rX {directory}` where the files are (on each node if they are a "
            "hostPath), or run as their owner (in the chart engine.podSecurityContext.runAsUser)"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def with_local_file(config: ModelConfig) -> ModelConfig:
    """Resolve a GGUF file on the hub to a local file, downloading it; return the new settings.

    `org/name:Q4_K_M` names the GGUF file of that repository with this suffix, case-insensitively.
    Other settings are returned unchanged.

    Raises:
        ModelNotFound: there is no such file, or the download failed.
    """
    named = _HUB_FILE.fullmatch(config.model)
    if named is None or Path(config.model).exists():
        return config
    from huggingface_hub import HfApi, snapshot_download

    repository, quant = named.groups()
    patterns = [f"*{each}.gguf" for each in {quant, quant.upper(), quant.lower()}]
    try:
        directory = snapshot_download(
            repository,
            revision=config.revision,
            allow_patterns=patterns,
            tqdm_class=download_progress(),
        )
        files = [file for each in patterns for file in sorted(Path(directory).rglob(each))]
        if not files:
            known = HfApi().list_repo_files(repository, revision=config.revision)
            others = ", ".join(name for name in known if name.endswith(".gguf"))
            raise ModelNotFound(
                f"{repository} has no GGUF file whose name ends in {quant}.gguf; it has: "
                + (others or "none")
            )
    except ModelNotFound:
        raise
    except Exception as error:
        raise ModelNotFound(
            f"{config.model} could not be fetched from the hub: {_line(error)}"
        ) from error
    names = config.served_model_name or (config.model,)
    return msgspec.structs.replace(config, model=str(files[0]), served_model_name=names)


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names that clients can use for the model, the preferred one first."""
    if config.served_model_name:
        return config.served_model_name
    local = Path(config.model).expanduser()
    if local.resolve() == BUNDLED_MODEL.resolve():  # also through a symlink
        return (BUNDLED_MODEL_NAME,)
    if is_gguf(config.model):
        return (local.stem,)
    return (local.resolve().name,) if local.is_dir() else (config.model,)
