"""Commands for model files: download, list and remove cached models, save sharded checkpoints."""

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.shared.config import ModelConfig
from engine.shared.model_files import ModelNotFound, model_directory, with_local_file
from server.config.tools import CachedConfig, FetchConfig, ShardedConfig


def cached(config: CachedConfig) -> int:
    """List cached models, or remove the named ones; return the exit code."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound as error:
        print(f"no model has been fetched: {error.cache_dir} is not there", file=sys.stderr)
        return 1 if config.models.remove else 0
    repositories = sorted(
        (each for each in cache.repos if each.repo_type == "model"), key=lambda each: each.repo_id
    )
    if config.models.remove:
        doomed = [each for each in repositories if each.repo_id == config.models.remove]
        if not doomed:
            print(f"swell models: {config.models.remove} is not in the cache", file=sys.stderr)
            return 1
        removal = cache.delete_revisions(
            *(revision.commit_hash for each in doomed for revision in each.revisions)
        )
        removal.execute()
        print(f"{config.models.remove} is removed, {removal.expected_freed_size_str} are free")
        return 0
    table = Table(box=None, pad_edge=False)
    for title in ("MODEL", "SIZE", "LAST USED"):
        table.add_column(title, no_wrap=True)
    for repository in repositories:
        size, used = repository.size_on_disk_str, repository.last_accessed_str
        table.add_row(repository.repo_id, size, used)
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        for name in sorted(files):
            if name.endswith(".gguf"):
                table.add_row(f"  {name}", "", "")
    Console(soft_wrap=True).print(table)
    return 0


def save_sharded_state(config: ShardedConfig, save: Callable[[Path, Path, int], list[Path]]) -> int:
    """Split a checkpoint into shards, print them and return the exit code.

    `save` writes the shards, given the model, the output directory and the number of processes.
    """
    target = config.sharded
    if not target.model or not target.output:
        print("swell save-sharded-state: MODEL and --output are needed", file=sys.stderr)
        return 2
    try:
        model = model_directory(ModelConfig(model=target.model), weights=True)
        parts = save(model, Path(target.output).expanduser(), target.tensor_parallel_size)
    except (ValueError, OSError) as error:
        print(f"swell save-sharded-state: {error}", file=sys.stderr)
        return 1
    for part in parts:
        print(f"{part}: {part.stat().st_size / 1e6:,.1f} MB", file=sys.stderr)
    return 0


def fetch(config: FetchConfig) -> int:
    """Download missing files of a model, print its directory and return the exit code."""
    target = config.fetch
    if not target.model:
        print("swell fetch: which model? e.g. swell fetch Qwen/Qwen3-0.6B", file=sys.stderr)
        return 2
    requested = ModelConfig(model=target.model, revision=target.revision)
    try:
        found = with_local_file(requested)
        if found is not requested:
            print(
                f"{found.model}: {Path(found.model).stat().st_size / 1e6:,.1f} MB", file=sys.stderr
            )
            return 0
        directory = model_directory(requested, weights=not target.text_only)
    except ModelNotFound as error:
        print(f"swell fetch: {error}", file=sys.stderr)
        return 1
    files = [file for file in directory.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"{directory}: {len(files)} files, {size / 1e6:,.1f} MB", file=sys.stderr)
    return 0
