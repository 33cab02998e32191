"""Engines that store their KV blocks generate the same tokens with less computation."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fixtures import MakePrompt, SaveModel
from tests.engine.serving import Answer, request, serve
from tests.support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _disks_of_busy_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late blocks are not treated as missing."""
    monkeypatch.setattr("engine.kv.tiers.FETCH_TIMEOUT", PATIENCE)


def answers(
    directory: Path, prompts: list[list[int]], tiers: dict[str, Any], **options: Any
) -> tuple[list[Answer], Any]:
    requests = [request(id, each, temperature=0.0) for id, each in enumerate(prompts)]
    found, stats = serve(
        directory, requests, dtype="float32", batch_invariant=True, tiers=tiers, **options
    )
    return found, stats.counters


@pytest.mark.parametrize(
    ("policy", "name", "options"),
    [
        ("all", "llama", {"kv_cache_dtype": "fp8", "async_scheduling": True}),
        ("all", "llama", {"speculative_ngram": 3, "long_prefill_token_threshold": 7}),
        ("all", "qwen3-moe", {}),
        ("all", "mistral-window", {}),
        ("all", "gemma3", {}),
        ("all", "deepseek3", {}),
        ("evicted", "llama", {"async_scheduling": True}),
        ("evicted", "gemma3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "plain"),
)
def test_restarted_engine_reads_prefixes_and_gives_same_answers(
    policy: str,
    name: str,
    options: dict[str, Any],
    checkpoint: SaveModel,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    directory = checkpoint(name).directory
    prompts = [prompt(90), prompt(90)[:50] + prompt(9), prompt(40)[::-1], prompt(30)]
    expected, _ = answers(directory, prompts, {}, **options)
    tiers = {"kv_disk_tier_dir": str(tmp_path / "tier"), "kv_tier_policy": policy}
    first, stored = answers(directory, prompts, tiers, **options, num_blocks=33)
    assert first == expected
    assert stored.kv_tier_stored_bytes > 0
    again, read = answers(directory, prompts, tiers, **options)
    assert again == expected
    if policy == "all":
        assert read.kv_tier_hits > 90
        assert read.prefix_cache_hits > stored.prefix_cache_hits + 100
    assert stored.kv_tier_errors == read.kv_tier_errors == 0


def test_shared_memory_is_used_by_engines_and_released(
    checkpoint: SaveModel, prompt: MakePrompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv.tier_opening.MEMORY_TIERS", tmp_path)
    directory, prompts = checkpoint("llama").directory, [prompt(80)]
    answers(directory, prompts, {"kv_memory_tier_bytes": 1 << 24})
    assert not list(tmp_path.iterdir())


def test_damaged_blocks_are_computed_again(
    checkpoint: SaveModel, prompt: MakePrompt, tmp_path: Path
) -> None:
    directory, prompts = checkpoint("llama").directory, [prompt(80)]
    tiers = {"kv_disk_tier_dir": str(tmp_path / "tier")}
    expected, _ = answers(directory, prompts, tiers)
    for path in (tmp_path / "tier").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-3] + b"bad")
    again, counters = answers(directory, prompts, tiers)
    assert again == expected
    assert counters.kv_tier_errors > 0
    assert counters.kv_tier_hits == 0


def test_other_model_does_not_read_blocks(
    checkpoint: SaveModel, prompt: MakePrompt, tmp_path: Path
) -> None:
    prompts, tiers = [prompt(80)], {"kv_disk_tier_dir": str(tmp_path / "tier")}
    answers(checkpoint("llama").directory, prompts, tiers)
    _, counters = answers(checkpoint("mistral-window").directory, prompts, tiers)
    assert counters.kv_tier_hits == 0
