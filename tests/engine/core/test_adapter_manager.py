"""An engine holds the adapters of the cluster's list, and those still used by requests."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.core.adapter_manager import AdapterManager
from engine.core.engine_core import EngineCore
from engine.executor.simulated import SimulatedExecutor
from engine.lora.adapter_config import BadAdapter
from engine.lora.modules import AdaptableModules
from engine.lora.store import AdapterStore
from engine.models.hf_config import read_spec
from engine.process.receiver import configured_adapters
from engine.shared.config import BUNDLED_MODEL, CacheConfig, EngineConfig, LoraConfig, ModelConfig
from engine.shared.messages import (
    AdapterEntry,
    AdapterLoadResult,
    AdapterTable,
    AddRequest,
    SamplingParams,
    UtilityCall,
)
from tests.support.adapter_files import write_adapter


class Engine:
    """A core with adapters in a temporary directory."""

    def __init__(self, root: Path, **lora: Any) -> None:
        settings = {"enable_lora": True, "max_loras": 2, "lora_dir": str(root), **lora}
        config = EngineConfig(
            model=ModelConfig(max_model_len=64),
            cache=CacheConfig(block_size=4, num_kv_blocks=64),
            lora=LoraConfig(**settings),
        )
        modules, rank = AdaptableModules(read_spec(BUNDLED_MODEL)), config.lora.max_lora_rank
        self.store = AdapterStore(
            modules.max_size(rank), lambda files: bool(modules.pairs(files, rank))
        )
        executor = SimulatedExecutor(config, timing="virtual", adapters=self.store)
        self.reports: list[list[AdapterLoadResult]] = []
        self.core = EngineCore(
            config,
            executor,
            rank=0,
            incarnation=1,
            on_adapters=lambda _, held: self.reports.append(held),
        )
        self.core.front_end_joined(0, 1)
        self.config = config

    def take(self, revision: int, *entries: AdapterEntry) -> dict[int, AdapterLoadResult]:
        """Apply an adapter list completely; return the last reports, by serial."""
        self.core.adapters.take(AdapterTable(revision, list(entries)))
        self.core.adapters.wait()
        return {each.serial: each for each in self.reports[-1]}

    def run(self, id: int, version: str, max_tokens: int = 3) -> list[Any]:
        sampling = SamplingParams(max_tokens=max_tokens, seed=id)
        self.core.handle(AddRequest(id, str(id), 0, 0, [1, 2, 3], sampling, adapter=version))
        outputs = []
        while self.core.has_work:
            outputs += self.core.step().outputs.get(0, [])
        return outputs

    def call(self, utility: str, **arguments: Any) -> Any:
        self.core.handle(UtilityCall(1, 0, utility, arguments))
        answers = self.core.answers()
        assert answers is not None
        [(_, result)] = answers.utility_results
        return result.error or result.result


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    for seed, name in enumerate(("sql", "law", "art")):
        write_adapter(tmp_path / name, seed=seed)
    made = Engine(tmp_path)
    yield made
    made.store.shutdown()


def test_adapter_is_served_until_it_leaves_the_table(engine: Engine) -> None:
    held = engine.take(1, AdapterEntry(1, "sql", "sql"))[1]
    assert held.version
    assert engine.run(1, held.version)[-1].finish_reason == "length"
    assert engine.take(2) == {}
    assert held.version not in engine.store
    assert engine.run(2, held.version)[-1].finish_reason == "error"


def test_a_version_stays_until_its_last_request_has_ended(engine: Engine) -> None:
    version = engine.take(1, AdapterEntry(1, "sql", "sql"))[1].version
    sampling = SamplingParams(max_tokens=10, seed=1)
    engine.core.handle(AddRequest(1, "1", 0, 0, [1, 2, 3], sampling, adapter=version))
    engine.core.step()
    engine.take(2, AdapterEntry(2, "sql", "law"))
    assert version in engine.store
    tokens = []
    while engine.core.has_work:
        tokens += engine.core.step().outputs.get(0, [])
    assert tokens[-1].finish_reason == "length"
    engine.core.step()
    assert version not in engine.store


def test_the_same_content_under_two_names_is_one_version(engine: Engine, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "sql", tmp_path / "copy")
    entries = AdapterEntry(1, "sql", "sql"), AdapterEntry(2, "copy", "copy")
    held = engine.take(1, *entries)
    assert held[1].version == held[2].version
    engine.take(2, entries[1])
    assert held[1].version in engine.store


def test_older_adapter_table_changes_nothing(engine: Engine) -> None:
    entry = AdapterEntry(1, "sql", "sql")
    held = engine.take(5, entry)
    engine.core.adapters.take(AdapterTable(4))
    assert engine.take(5, entry) == held


def test_changed_files_do_not_count_as_the_same_version(engine: Engine, tmp_path: Path) -> None:
    version = engine.take(1, AdapterEntry(1, "sql", "sql"))[1].version
    engine.take(2)
    write_adapter(tmp_path / "sql", seed=9)
    held = engine.take(3, AdapterEntry(3, "sql", "sql", version, "serving"))
    assert "changed" in held[3].error
    assert version not in engine.store


def test_paths_outside_too_many_adapters_and_bad_ones_are_reported(tmp_path: Path) -> None:
    for seed, name in enumerate(("sql", "law")):
        write_adapter(tmp_path / "root" / name, seed=seed)
    write_adapter(tmp_path / "secret")
    (tmp_path / "root" / "bad").mkdir()
    engine = Engine(tmp_path / "root", max_loras=1, max_cpu_loras=2)
    held = engine.take(
        1,
        AdapterEntry(1, "secret", "../secret"),
        AdapterEntry(2, "bad", "bad"),
        AdapterEntry(3, "sql", "sql"),
    )
    assert "outside" in held[1].error
    assert "adapter_config.json" in held[2].error
    assert "--max-cpu-loras" in held[3].error
    engine.store.shutdown()
    closed = Engine(tmp_path / "root", lora_dir=None)
    assert "--lora-dir" in closed.take(1, AdapterEntry(1, "sql", "sql"))[1].error
    closed.store.shutdown()


def test_configured_adapters_can_be_in_any_directory(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one")
    write_adapter(tmp_path / "two", seed=2)
    text = json.dumps({"name": "two", "path": str(tmp_path / "two")})
    engine = Engine(tmp_path / "none", lora_modules=(f"one={tmp_path / 'one'}", text))
    table = configured_adapters(engine.config.lora)
    assert table is not None
    engine.core.adapters.take(table)
    assert engine.core.adapters.wait() == []
    assert engine.call("list_loras").keys() == {"one", "two"}
    engine.store.shutdown()


def test_adapters_are_pinned_by_name(engine: Engine) -> None:
    engine.take(1, AdapterEntry(1, "sql", "sql"), AdapterEntry(2, "law", "law"))
    assert engine.call("pin_lora", name="sql") == {"is_pinned": True}
    assert "--max-loras" in engine.call("pin_lora", name="law")
    assert "no adapter 'none'" in engine.call("pin_lora", name="none")
    assert engine.call("unpin_lora", name="sql") == {"is_pinned": False}
    assert engine.call("pin_lora", name="law") == {"is_pinned": True}


def test_stats_list_running_and_waiting_adapters(engine: Engine) -> None:
    held = engine.take(1, *(AdapterEntry(i, n, n) for i, n in enumerate(("sql", "law", "art"), 1)))
    versions = [each.version for _, each in sorted(held.items())]
    for id, version in enumerate(versions, 1):
        sampling = SamplingParams(max_tokens=9, seed=id)
        engine.core.handle(AddRequest(id, str(id), 0, 0, [1, 2, 3], sampling, adapter=version))
    engine.core.step()
    load = engine.core.stats().adapters
    assert load is not None
    assert set(load.running) == set(versions[:2])
    assert load.waiting == versions[2:]


@pytest.mark.parametrize(
    "lora",
    [
        {"lora_dir": "/x"},
        {"lora_modules": ("a=b",)},
        {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2},
        {"enable_lora": True, "lora_modules": ("a=b", "a=c")},
        {"enable_lora": True, "lora_modules": ("ab",)},
        {"enable_lora": True, "lora_modules": ('{"name": "a"}',)},
        {"enable_lora": True, "lora_modules": ('{"name": "a", "path": "b", "x": 1}',)},
    ],
)
def test_settings_that_contradict_each_other_are_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lora"):
        LoraConfig(**lora)


class Refusing:
    """Cannot use any adapter."""

    def hold(self, version: str) -> None:
        raise BadAdapter("too strange")

    def drop(self, version: str) -> None:
        pass


def test_adapter_that_cannot_be_used_is_reported_and_forgotten(engine: Engine) -> None:
    reports: list[list[AdapterLoadResult]] = []
    manager = AdapterManager(
        engine.config.lora,
        engine.store,
        Refusing(),
        lambda _: False,
        lambda _, held: reports.append(held),
    )
    manager.take(AdapterTable(1, [AdapterEntry(1, "sql", "sql")]))
    [(_, error)] = manager.wait()
    assert error == "too strange"
    assert reports[-1] == [AdapterLoadResult(1, error="too strange")]
    assert list(engine.store) == []
    version = engine.store.load("sql", engine.config.lora.lora_dir).result()
    manager.take(AdapterTable(2, [AdapterEntry(2, "law", "sql", version)]))
    assert reports[-1] == [AdapterLoadResult(2, error="too strange")]
