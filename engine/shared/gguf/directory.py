"""A GGUF file's config, tokenizer and chat template as a Hugging Face directory without weights.

Every process of a stack reads these files; the first one that needs them writes them.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine.shared.gguf.network import config_of, ending_ids, frequency_divisors
from engine.shared.gguf.reader import Gguf, read_gguf
from engine.shared.gguf.vocabulary import special_tokens, tokenizer_of
from engine.shared.user_cache import user_cache

_FORM = 3
"""Version of the written files; increased whenever their content changes."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""`general.sampling.*` keys and their generation_config.json names."""


def is_gguf(model: str) -> bool:
    """Return whether a model's path names a GGUF file."""
    return model.endswith(".gguf") and Path(model).expanduser().is_file()


def text_directory(path: Path) -> Path:
    """Return the directory with the text files of a GGUF model, in the user's cache.

    Raises:
        BadGguf: the file is malformed or unsupported.
        OSError: the file cannot be read, or the cache cannot be written.
    """
    gguf = read_gguf(path)
    # The RoPE frequency divisors are stored among the weights, outside the header's digest.
    described = f"{gguf.digest} {frequency_divisors(gguf, path)}"
    digest = hashlib.sha256(described.encode()).hexdigest()
    directory = user_cache() / "gguf" / f"{digest[:32]}-{_FORM}"
    if not directory.is_dir():
        _write(_files(gguf, path), directory)
    return directory


def _files(gguf: Gguf, path: Path) -> dict[str, dict[str, Any]]:
    metadata = gguf.metadata
    text: dict[str, Any] = special_tokens(metadata)
    # Many models use Llama's architecture, so it does not serve as a name.
    architecture = str(metadata.get("general.architecture"))
    own = "" if architecture == "llama" else architecture
    name = str(metadata.get("general.basename") or own)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        text["chat_template"] = template
    return {
        "config.json": {**config_of(gguf, path), "_name_or_path": name},
        "generation_config.json": {
            "eos_token_id": ending_ids(metadata),
            **{
                own_name: metadata[f"general.sampling.{gguf_name}"]
                for gguf_name, own_name in _SAMPLING.items()
                if f"general.sampling.{gguf_name}" in metadata
            },
        },
        "tokenizer.json": tokenizer_of(metadata),
        "tokenizer_config.json": text,
    }


def _write(files: dict[str, dict[str, Any]], directory: Path) -> None:
    """Create the directory atomically, so that no process sees a partial one."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=directory.parent))
    try:
        for name, content in files.items():
            (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process has written the same files
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
