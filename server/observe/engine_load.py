"""How loaded the engines are, in a few numbers."""

from server.router.generation_client import GenerationClient


def engine_load(client: GenerationClient) -> dict[str, float]:
    """Return sequences that wait and run in all engines, and the mean share of KV blocks in use."""
    view = client.view
    stats = [] if view is None else [entry.stats for entry in view.engines if entry.stats]
    return {
        "kv_cache_usage_perc": sum(each.kv_usage for each in stats) / max(1, len(stats)),
        "num_requests_waiting": sum(each.waiting for each in stats),
        "num_requests_running": sum(each.running for each in stats),
    }
