"""Fetches a model and says where it lies."""

import sys
from pathlib import Path

from engine.shared.config import ModelConfig
from engine.shared.model_files import ModelNotFound, model_directory, with_local_file
from server.fetch.config import FetchConfig


def fetch(config: FetchConfig) -> int:
    """Fetch what is missing, print the directory and return the exit code."""
    target = config.fetch
    if not target.model:
        print("swell fetch: which model? e.g. swell fetch Qwen/Qwen3-0.6B", file=sys.stderr)
        return 2
    wanted = ModelConfig(model=target.model, revision=target.revision)
    try:
        found = with_local_file(wanted)
        if found is not wanted:
            print(
                f"{found.model}: {Path(found.model).stat().st_size / 1e6:,.1f} MB", file=sys.stderr
            )
            return 0
        directory = model_directory(wanted, weights=not target.text_only)
    except ModelNotFound as error:
        print(f"swell fetch: {error}", file=sys.stderr)
        return 1
    files = [file for file in directory.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"{directory}: {len(files)} files, {size / 1e6:,.1f} MB", file=sys.stderr)
    return 0
