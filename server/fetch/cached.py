"""Shows the models in the hub's local cache, or removes one."""

import sys

from rich.console import Console
from rich.table import Table

from server.fetch.config import CachedConfig


def cached(config: CachedConfig) -> int:
    """Print what there is, or remove what is named; return the exit code."""
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
