"""An engine reads another's prompt KV blocks: same tokens with less computation."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zmq
from msgspec.structs import replace

from engine.kv import transfer_port as module
from engine.kv.block_store import MODEL_SIZE
from engine.kv.transfer_messages import BlocksWanted
from engine.shared.config import BUNDLED_MODEL, ClusterConfig, LoraConfig
from engine.shared.messages import AbortRequests, AddRequest, KvSource, encode
from tests.engine.executor.test_images import show, text
from tests.engine.fixtures import MakePrompt, SaveModel
from tests.engine.kv.played_engine import PlayedEngine
from tests.engine.serving import every_kind, request
from tests.support.adapter_files import write_adapter
from tests.support.waiting import PATIENCE, until

Start = Callable[..., PlayedEngine]
Expected: TypeAlias = tuple[Path, AddRequest, list[int]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines and close them at the end; long timeouts allow for busy machines."""
    monkeypatch.setattr(module, "PATIENCE", PATIENCE)
    engines: list[PlayedEngine] = []

    def started(model: Path, sockets: Path | None = tmp_path, **options: Any) -> PlayedEngine:
        options.setdefault("incarnation", 10 + len(engines))
        engines.append(PlayedEngine(model, sockets, **options))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def llama(checkpoint: SaveModel, prompt: MakePrompt) -> Expected:
    """A model's directory, a request, and the answer of an engine without others."""
    directory, message = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    alone = PlayedEngine(directory, None, incarnation=1)
    try:
        return directory, message, alone.answer(message)
    finally:
        alone.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}),
        ("mistral-window", {"long_prefill_token_threshold": 7}),
        ("gemma3", {}),
        ("gemma3", {"shards": 2, "async_scheduling": True, "kv_cache_dtype": "fp8"}),
        ("deepseek3", {"shards": 2, "kv_cache_dtype": "fp8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "plain"),
)
def test_tokens_are_the_same_with_and_without_blocks_of_another_engine(
    name: str, options: dict[str, Any], checkpoint: SaveModel, prompt: MakePrompt, start: Start
) -> None:
    directory = checkpoint(name).directory
    prompts = [prompt(90), prompt(90)[:50] + prompt(9), prompt(40)[::-1], prompt(33)]
    requests = [
        request(id, each, temperature=float(id % 2), max_tokens=16)
        for id, each in enumerate(prompts, 1)
    ]
    prefill = start(directory, role="prefill", **options)
    decode = start(directory, role="decode", **options)
    expected = [decode.answer(each) for each in requests]
    decode.core._scheduler.reset_prefix_cache()
    for each, tokens in zip(requests, expected, strict=True):
        source = prefill.prefill(each)
        assert decode.answer(each, kv_source=source) == tokens
    assert decode.counters.kv_transfer_failures == 0
    assert decode.counters.kv_transfer_hits > 90
    assert decode.counters.kv_transfer_bytes == prefill.counters.kv_transfer_sent_bytes > 0


@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"speculative_ngram": 3}])
def test_requests_of_every_kind_are_answered_alike_while_some_are_preempted(
    options: dict[str, Any], checkpoint: SaveModel, start: Start
) -> None:
    directory, requests = checkpoint("llama").directory, every_kind()
    alone = start(directory, None, **options)
    expected = {each.id: alone.outputs_of_all([each]) for each in requests}
    prefill = start(directory, role="prefill", num_blocks=40, **options)
    decode = start(directory, role="decode", num_blocks=40, **options)
    sources = [prefill.prefill(each) for each in requests]
    outputs = decode.outputs_of_all(
        [replace(each, kv_source=source) for each, source in zip(requests, sources, strict=True)]
    )
    for each in requests:
        answers = expected[each.id], [output for output in outputs if output.id == each.id]
        first, found = (
            [
                ([token for output in answer for token in output.token_ids]),
                [entry for output in answer for entry in output.logprobs or []],
                [entry for output in answer for entry in output.prompt_logprobs or []],
                answer[-1].finish_reason,
            ]
            for answer in answers
        )
        assert first == found, each.sampling
    assert decode.counters.preemptions
    assert decode.counters.kv_transfer_hits > 100


@pytest.mark.parametrize(
    ("name", "shards"),
    [("smolvlm", 2), ("qwen2.5-vl", 1), ("gemma3-vision", 2), ("mistral3", 1)],
)
def test_an_image_whose_blocks_travel_is_encoded_once(
    name: str, shards: int, checkpoint: SaveModel, start: Start
) -> None:
    directory = checkpoint(name).directory
    first = show(1, text(5), 1, text(30), 2, text(40), name=name)
    second = show(2, text(5), 3, text(30), 2, text(40), name=name)
    alone = start(directory, None)
    expected = [alone.answer(each) for each in (first, second)]
    prefill = start(directory, role="prefill", shards=shards)
    decode = start(directory, role="decode", shards=shards)
    for each, tokens in zip((first, second), expected, strict=True):
        assert decode.answer(each, kv_source=prefill.prefill(each)) == tokens
    assert expected[0] != expected[1]
    assert prefill.counters.encoded_images == 3
    assert decode.counters.encoded_images == 0
    assert decode.counters.kv_transfer_failures == 0
    assert decode.counters.kv_transfer_hits > 90


def test_salts_and_adapters_are_distinguished(
    prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    root = tmp_path / "adapters"
    for seed, adapter in enumerate(("art", "law")):
        write_adapter(root / adapter, seed=seed, rank=4, size=0.3)
    lora = LoraConfig(enable_lora=True, lora_dir=str(root), max_loras=1, max_lora_rank=4)
    alone, prefill, decode = (
        start(BUNDLED_MODEL, sockets, lora=lora) for sockets in (None, tmp_path, tmp_path)
    )
    versions = [engine.load_adapters(["art", "law"]) for engine in (alone, prefill, decode)]
    assert versions[0] == versions[1] == versions[2]
    plain = request(1, prompt(90), max_tokens=20, temperature=0.0)
    salted = [replace(plain, id=2 + n, cache_root=bytes([1 + n]) * 16) for n in range(2)]
    adapted = [replace(plain, id=4 + n, adapter=each) for n, each in enumerate(versions[0])]
    for count, each in enumerate([plain, *salted, *adapted], 1):
        expected = alone.answer(each)
        assert decode.answer(each, kv_source=prefill.prefill(each)) == expected
        assert decode.counters.kv_transfer_hits == 88 * count, "it has its own blocks"
        other = replace(each, id=100 + count, cache_root=b"z" * 16)
        assert decode.answer(other, kv_source=prefill.source) == expected
        assert decode.counters.kv_transfer_hits == 88 * count, "they are nobody else's"


def test_blocks_of_differently_sharded_model_are_not_read(llama: Expected, start: Start) -> None:
    directory, message, expected = llama
    cut, whole = start(directory, shards=2), start(directory)
    assert whole.answer(message, kv_source=cut.prefill(message)) == expected
    assert whole.counters.kv_transfer_hits == 0
    assert whole.counters.kv_transfer_failures == 1


def test_successor_process_offers_no_blocks_of_predecessor(llama: Expected, start: Start) -> None:
    directory, message, expected = llama
    prefill, decode = start(directory), start(directory)
    prefill.prefill(message)
    stale = KvSource(prefill.source.address, 999)
    assert decode.answer(message, kv_source=stale) == expected
    assert decode.counters.kv_transfer_failures == 1
    assert decode.counters.kv_transfer_bytes == 0


def test_blocks_of_another_model_or_cache_are_not_read(
    checkpoint: SaveModel, llama: Expected, start: Start
) -> None:
    directory, message, expected = llama
    decode = start(directory)
    for other in (start(directory, kv_cache_dtype="fp8"), start(checkpoint("gemma3").directory)):
        source = other.prefill(message)
        assert decode.answer(message, kv_source=source) == expected
        decode.core._scheduler.reset_prefix_cache()
    assert decode.counters.kv_transfer_hits == 0


def test_dead_peer_only_costs_recomputation(llama: Expected, start: Start) -> None:
    directory, message, expected = llama
    prefill, decode = start(directory), start(directory)
    source = prefill.prefill(message)
    prefill.close()
    assert decode.answer(message, kv_source=source) == expected
    assert decode.counters.kv_transfer_failures == 1


def test_blocks_without_room_are_computed_after_the_fetched_ones(
    llama: Expected, start: Start
) -> None:
    directory, message, expected = llama
    decode = start(directory)
    small = {"kv_transfer_bytes": 4 * len(decode._executor.read_block(0))}
    source = start(directory, tiers=small).prefill(message)
    assert decode.answer(message, kv_source=source) == expected
    assert decode.counters.kv_transfer_hits == 4 * 8
    assert decode.counters.kv_transfer_failures == 1


def test_encrypted_pull_needs_the_key(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, message = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    keys = tmp_path / "key", tmp_path / "other"
    for key in keys:
        key.write_text(f"a secret of these tests: {key.name}")
    allowed, strange = (
        ClusterConfig(coordinator="127.0.0.1:1", cluster_key_file=str(key)) for key in keys
    )
    expected = start(directory, None).answer(message)
    prefill, decode = start(directory, cluster=allowed), start(directory, cluster=allowed)
    stranger = start(directory, cluster=strange)
    source = prefill.prefill(message)
    assert source.address.startswith("tcp://127.0.0.1:")
    without_key = decode._context.socket(zmq.DEALER)
    without_key.connect(source.address)
    assert prefill.port is not None
    offered = list(prefill.port._offers._once)
    names = [key[MODEL_SIZE:] for key in offered]
    without_key.send(encode(BlocksWanted(source.incarnation, offered[0][:MODEL_SIZE], 1, names)))
    host, port = source.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as nonsense:
        nonsense.sendall(bytes(range(256)))
        assert stranger.answer(message, kv_source=source) == expected
    assert stranger.counters.kv_transfer_hits == 0
    assert list(prefill.port._offers._once) == offered
    assert not without_key.poll(0)
    without_key.close(linger=0)
    assert decode.answer(message, kv_source=source) == expected
    assert decode.counters.kv_transfer_hits == 88


def test_request_aborted_during_transfer_leaves_nothing(
    checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, message = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    decode = start(directory)
    silent = decode._context.socket(zmq.ROUTER)
    silent.bind(f"ipc://{tmp_path}/silent")
    source = KvSource(f"ipc://{tmp_path}/silent", 1)
    decode.core.handle(replace(message, kv_source=source))
    assert silent.poll(int(1000 * PATIENCE)), "it has asked"
    assert decode.core.has_requests
    decode.core.handle(AbortRequests([message.id]))
    assert not decode.core.has_requests
    decode.core._scheduler.check_integrity()
    assert decode.core._scheduler.gauges().kv_usage == 0
    assert decode._tiers is not None
    assert decode._tiers._fetched_bytes == 0
    silent.close(linger=0)


@pytest.mark.parametrize("shards", [1, 2])
def test_tier_supplies_blocks_missing_on_dead_peer(
    shards: int, checkpoint: SaveModel, prompt: MakePrompt, start: Start, tmp_path: Path
) -> None:
    directory, message = checkpoint("llama").directory, request(1, prompt(90), temperature=0.0)
    tier = {"kv_disk_tier_dir": str(tmp_path / "tier")}
    decode = start(directory, tiers=tier, shards=shards)
    expected = decode.answer(message)
    until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 11, "its blocks are stored")
    decode.core._scheduler.reset_prefix_cache()
    gone = KvSource(f"ipc://{tmp_path}/gone", 1)
    assert decode.answer(message, kv_source=gone) == expected
    assert decode.counters.kv_tier_hits == 88
    assert decode.counters.kv_transfer_failures == 1
