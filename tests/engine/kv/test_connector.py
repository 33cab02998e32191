"""KV blocks stored by a plugin."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.kv.connector import Connector
from engine.kv.transfer_settings import BadKvTransfer, Transfer, read_transfer
from engine.shared.config import CacheConfig
from engine.shared.plugins import BadPlugin
from tests.engine.fixtures import MakePrompt, SaveModel
from tests.engine.serving import Answer, request, serve
from tests.support.plugins import offer
from tests.support.waiting import PATIENCE

TOY = '''
class Toy:
    """Keeps blocks in the process, by the name of a shelf."""

    shelves = {}

    def __init__(self, config, options):
        self.shelf = self.shelves.setdefault(options["shelf"], {})
        self.does = options.get("does", "")

    def load(self, key):
        if self.does == "fail":
            raise LookupError("the shelf has fallen down")
        data = self.shelf.get(key)
        if self.does == "damage" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data

    def save(self, key, data):
        if self.does == "fail":
            raise RuntimeError("no hands")
        self.shelf[key] = data
        return True

    def clear(self, model):
        for key in [each for each in self.shelf if each.startswith(model)]:
            del self.shelf[key]

    def close(self):
        if self.does == "fail":
            raise OSError("the door is stuck")


def half(config, options):
    """What lacks every method."""
'''


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "toy_shelf.py").write_text(TOY)
    offer(tmp_path, "swell.kv_connectors", toy="toy_shelf:Toy", half="toy_shelf:half")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("engine.kv.tiers.FETCH_TIMEOUT", PATIENCE)
    yield
    sys.modules.pop("toy_shelf", None)


def toy_of(shelf: str, does: str = "") -> dict[str, Any]:
    return {
        "kv_connector": "toy",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shelf": shelf, "does": does},
    }


def chain(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def answer(model: Path, prompt: list[int], config: dict[str, Any] | None) -> tuple[Answer, Any]:
    tiers = {} if config is None else {"kv_transfer_config": json.dumps(config)}
    [found], stats = serve(
        model, [request(1, prompt, temperature=0.0)], dtype="float32", tiers=tiers
    )
    return found, stats.counters


def test_engine_reads_blocks_stored_by_another(checkpoint: SaveModel, prompt: MakePrompt) -> None:
    model = checkpoint("llama").directory
    expected, _ = answer(model, prompt(60), None)
    first, counters = answer(model, prompt(60), toy_of("one"))
    assert counters.kv_tier_stored_bytes > 0
    second, counters = answer(model, prompt(60), chain(toy_of("none"), toy_of("one")))
    assert counters.kv_tier_hits == 56
    assert first == second == expected


@pytest.mark.parametrize("does", ["damage", "fail"])
def test_faulty_connector_only_costs_recomputation(
    does: str, checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    model = checkpoint("llama").directory
    expected, _ = answer(model, prompt(60), toy_of(does))
    found, counters = answer(model, prompt(60), toy_of(does, does))
    assert found == expected
    assert counters.kv_tier_errors > 0
    assert counters.kv_tier_hits == 0


def test_connector_that_cannot_be_opened_is_named(
    checkpoint: SaveModel, prompt: MakePrompt
) -> None:
    config = toy_of("one") | {"kv_connector_extra_config": {}}
    with pytest.raises(BadPlugin, match=r"kv_connector toy.*KeyError"):
        answer(checkpoint("llama").directory, prompt(9), config)


def test_connector_without_a_method_is_named(checkpoint: SaveModel, prompt: MakePrompt) -> None:
    with pytest.raises(BadPlugin, match=r"kv_connector half.*KvConnector"):
        answer(checkpoint("llama").directory, prompt(9), toy_of("one") | {"kv_connector": "half"})


def read(config: dict[str, Any]) -> Transfer | None:
    return read_transfer(CacheConfig(kv_transfer_config=json.dumps(config)), 0)


def test_plugin_connectors_and_transfers_can_be_combined() -> None:
    own = {"kv_connector": "SwellConnector", "kv_role": "kv_consumer", "kv_buffer_size": 9}
    toys = tuple(Connector("toy", {"shelf": each, "does": ""}) for each in "ab")
    assert read(chain(toy_of("a"), own, toy_of("b"))) == Transfer("decode", 9, toys)
    assert read(toy_of("a")) == Transfer(None, 1 << 30, toys[:1])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (toy_of("a") | {"kv_connector": "NixlConnector"}, "SwellConnector, half, toy"),
        (toy_of("a") | {"kv_role": "kv_producer"}, "toy is for kv_both"),
        (toy_of("a") | {"kv_buffer_size": 9}, "kv_buffer_size"),
        (chain(), "connectors"),
        (chain(toy_of("a")) | {"kv_role": "kv_producer"}, "with MultiConnector"),
        (chain(*[{"kv_role": "kv_both"}] * 2), "SwellConnector occurs more than once"),
        (chain(chain(toy_of("a"))), "MultiConnector"),
        (chain(toy_of("a")) | {"kv_connector_extra_config": {}}, "connectors"),
    ],
)
def test_contradictory_config_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(BadKvTransfer, match=f"--kv-transfer-config: .*{named}"):
        read(config)
