"""What one engine has computed of a prompt, another reads: the same tokens, from less computing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.kv_transfer import port as module
from engine.shared.config import ClusterConfig
from engine.shared.messages import AbortRequests, KvSource
from tests.engine.fixtures import MakePrompt, SaveModel
from tests.engine.kv_transfer.played_engine import PlayedEngine
from tests.engine.serving import request
from tests.support.waiting import PATIENCE, until

Start = Callable[..., PlayedEngine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines, which are closed at the end; on busy machines they wait for each other."""
    monkeypatch.setattr(module, "PATIENCE", PATIENCE)
    engines: list[PlayedEngine] = []

    def started(model: Path, sockets: Path | None = tmp_path, **options: Any) -> PlayedEngine:
        options.setdefault("incarnation", 10 + len(engines))
        engines.append(PlayedEngine(model, sockets, **options))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"async_scheduling": True}),
        ("llama", {"speculative_ngram": 3}),
        ("llama", {"long_prefill_token_threshold": 7}),
        ("qwen3-moe", {}),
        ("mistral-window", {}),
        ("gemma3", {}),
        ("deepseek3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "plain"),
)
def test_tokens_are_the_same_with_and_without_blocks_of_another_engine(
    name: str, options: dict[str, Any], checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory = checkpoint(name).directory
    prompts = [prompt(90), prompt(90)[:50] + prompt(9), prompt(40)[::-1], prompt(33)]
    requests = [
        request(id, each, temperature=float(id % 2), max_tokens=30)
        for id, each in enumerate(prompts, 1)
    ]
    alone = start(directory, None, **options)
    expected = [alone.answer(each) for each in requests]
    prefill = start(directory, role="prefill", **options)
    decode = start(directory, role="decode", **options)
    for each, tokens in zip(requests, expected, strict=True):
        source = prefill.prefill(each)
        assert decode.answer(each, kv_source=source) == tokens
    assert decode.counters.kv_transfer_failures == 0
    assert decode.counters.kv_transfer_hits > 90
    assert decode.counters.kv_transfer_bytes == prefill.counters.kv_transfer_sent_bytes > 0


def test_another_process_in_its_place_offers_nothing_of_it(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    expected = start(directory, None).answer(asked)
    prefill, decode = start(directory), start(directory)
    prefill.prefill(asked)
    stale = KvSource(prefill.source.address, 999)
    assert decode.answer(asked, kv_source=stale) == expected
    assert decode.counters.kv_transfer_failures == 1
    assert decode.counters.kv_transfer_bytes == 0


def test_blocks_of_another_model_or_cache_are_not_read(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    expected = start(directory, None).answer(asked)
    decode = start(directory)
    for other in (start(directory, kv_cache_dtype="fp8"), start(checkpoint("gemma3").directory)):
        source = other.prefill(asked)
        assert decode.answer(asked, kv_source=source) == expected
        decode.core._scheduler.reset_prefix_cache()
    assert decode.counters.kv_transfer_hits == 0


def test_a_dead_peer_costs_nothing_but_computing(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    expected = start(directory, None).answer(asked)
    prefill, decode = start(directory), start(directory)
    source = prefill.prefill(asked)
    prefill.close()
    assert decode.answer(asked, kv_source=source) == expected
    assert decode.counters.kv_transfer_failures == 1


def test_what_had_no_room_is_computed_after_what_had(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    expected = start(directory, None).answer(asked)
    decode = start(directory)
    small = {"kv_transfer_bytes": 4 * len(decode._executor.read_block(0))}
    source = start(directory, tiers=small).prefill(asked)
    assert decode.answer(asked, kv_source=source) == expected
    assert decode.counters.kv_transfer_hits == 4 * 8
    assert decode.counters.kv_transfer_failures == 1


def test_blocks_are_pulled_through_encrypted_sockets(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    keys = tmp_path / "key", tmp_path / "other"
    for key in keys:
        key.write_text(f"a secret of these tests: {key.name}")
    ours, strange = (
        ClusterConfig(coordinator="127.0.0.1:1", cluster_key_file=str(key)) for key in keys
    )
    expected = start(directory, None).answer(asked)
    prefill, decode = start(directory, cluster=ours), start(directory, cluster=ours)
    stranger = start(directory, cluster=strange)
    source = prefill.prefill(asked)
    assert source.address.startswith("tcp://127.0.0.1:")
    assert stranger.answer(asked, kv_source=source) == expected
    assert stranger.counters.kv_transfer_hits == 0
    assert decode.answer(asked, kv_source=source) == expected
    assert decode.counters.kv_transfer_hits == 88


def test_a_request_that_is_dropped_while_its_blocks_travel_leaves_nothing(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    decode = start(directory)
    silent = decode._context.socket(zmq.ROUTER)
    silent.bind(f"ipc://{tmp_path}/silent")
    source = KvSource(f"ipc://{tmp_path}/silent", 1)
    decode.core.handle(msgspec.structs.replace(asked, kv_source=source))
    assert silent.poll(int(1000 * PATIENCE)), "it has asked"
    assert decode.core.has_requests
    decode.core.handle(AbortRequests([asked.id]))
    assert not decode.core.has_requests
    decode.core._scheduler.check_integrity()
    assert decode.core._scheduler.gauges().kv_usage == 0
    assert decode._tiers is not None
    assert decode._tiers._fetched_bytes == 0
    silent.close(linger=0)


def test_a_tier_has_what_a_dead_peer_has_not(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, asked = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    decode = start(directory, tiers={"kv_disk_tier_dir": str(tmp_path / "tier")})
    expected = decode.answer(asked)
    until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 11, "its blocks are stored")
    decode.core._scheduler.reset_prefix_cache()
    gone = KvSource(f"ipc://{tmp_path}/gone", 1)
    assert decode.answer(asked, kv_source=gone) == expected
    assert decode.counters.kv_tier_hits == 88
    assert decode.counters.kv_transfer_failures == 1
