"""A router of others learns from engines' events which blocks they hold."""

import signal
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from benchmarks.running_stack import RunningStack
from engine.kv.events import SNAPSHOT, AllBlocksCleared, BlockStored
from engine.shared.block_names import ROOT_DIGEST, block_digest
from tests.engine.kv.test_event_journal import decoded
from tests.support.http import call, complete, completion, fetch
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar. " * 3


def test_block_events_list_blocks_of_live_engines_only(
    tmp_path: Path,
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = msgspec.json.encode({"endpoint": endpoint, "replay_endpoint": replay}).decode()
    flags = ("--data-parallel-size", "1", "--kv-events-config", config)
    with RunningStack(*flags) as stack, zmq.Context() as context:
        complete(stack.url, PROMPT, 4)
        blocks = snapshot(context, replay)
        tokens = call(f"{stack.url}/tokenize", {"prompt": PROMPT})["tokens"]
        size = blocks[0].block_size
        digest = ROOT_DIGEST
        for start in range(0, len(tokens) // size * size, size):
            digest = block_digest(digest, tokens[start : start + size])
            assert [digest] in [each.block_hashes for each in blocks]
        engine = stack.processes()["engine 0"]
        engine.send_signal(signal.SIGKILL)
        engine.wait(PATIENCE)
        until(
            lambda: fetch(f"{stack.url}/v1/completions", completion("a", 1)).status == 200,
            "its successor serves",
        )
        assert [digest] not in [each.block_hashes for each in snapshot(context, replay)]


def snapshot(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> list[BlockStored]:
    """Return all blocks that an engine holds."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart([b"", SNAPSHOT.to_bytes(8, "big")])
        assert socket.poll(int(1000 * PATIENCE)), "no answer"
        _, _, content = socket.recv_multipart()
        batch = decoded(content)
        assert abs(batch.ts - time.time()) < 60
        first, *rest = batch.events
        assert first == AllBlocksCleared()
        return [each for each in rest if isinstance(each, BlockStored)]
