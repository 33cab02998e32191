"""Defaults of settings follow the CUDA devices of a machine."""

from typing import Any

import pytest

from engine.shared import settings
from engine.shared.config import EngineConfig
from server import cli
from server.config import ServeConfig
from server.config.commands import defaults_for


def defaults(num_devices: int, **flags: Any) -> dict[str, Any]:
    return defaults_for(settings.load(ServeConfig, flags, {}), num_devices)


def test_cpus_change_no_defaults() -> None:
    assert defaults(0) == {}
    assert defaults(8, device="cpu") == {}
    assert defaults(8, executor="simulated") == {}


def test_step_budget_fits_longest_prompt_without_chunking() -> None:
    whole = {"enable_chunked_prefill": False}
    assert defaults(0, **whole, max_model_len=3000) == {"max_num_batched_tokens": 3000}
    assert defaults(0, **whole, max_model_len=100) == {"max_num_batched_tokens": 2048}
    assert defaults(1, **whole, max_model_len=3000)["max_num_batched_tokens"] == 8192


@pytest.mark.parametrize(
    ("devices", "flags", "engines"),
    [
        (1, {}, 1),
        (8, {}, 8),
        (8, {"tensor_parallel_size": 4}, 2),
        (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        (2, {"tensor_parallel_size": 4}, 1),
    ],
)
def test_number_of_engines_follows_devices(
    devices: int, flags: dict[str, Any], engines: int
) -> None:
    assert defaults(devices, **flags)["data_parallel_size"] == engines


@pytest.mark.parametrize(
    "flags",
    [
        {"data_parallel_size_local": 4},
        {"data_parallel_rank": 1},
        {"data_parallel_address": "head", "headless": True},
        {"data_parallel_backend": "ray"},
    ],
)
def test_multi_node_engine_count_does_not_follow_local_devices(
    flags: dict[str, Any],
) -> None:
    assert "data_parallel_size" not in defaults(4, **flags)


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_explicit_settings_win(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    found: list[Any] = []
    monkeypatch.setattr(cli, "num_cuda_devices", lambda: 4)

    def run(config: Any) -> int:
        found.append(config)
        return 0

    monkeypatch.setitem(cli.COMMANDS, command, cli.COMMANDS[command]._replace(run=run))
    monkeypatch.setenv("SWELL_BLOCK_SIZE", "32")
    assert cli.main([command, "--max-num-seqs", "9"]) == 0
    assert cli.main([command]) == 0
    config, plain = found
    assert (config.scheduler.max_num_seqs, plain.scheduler.max_num_seqs) == (9, 256)
    assert config.scheduler.max_num_batched_tokens == 8192
    assert config.cache.block_size == 32
    engines = EngineConfig().parallel.data_parallel_size if command == "engine" else 4
    assert config.parallel.data_parallel_size == engines
