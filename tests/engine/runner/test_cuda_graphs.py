"""Recording of decode steps, with a fake torch.cuda recorder."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.models.attention.cuda import KernelAttention
from engine.models.attention.interface import Heads
from engine.runner import cuda_graphs
from engine.runner.cuda_graphs import DecodeGraphs
from engine.runner.inputs import attention_rows, batch_rows
from tests.engine.fixtures import LoadDriver, MakePrompt, SaveModel
from tests.engine.triton_device import HAS_DEVICE

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="there, steps are recorded by the device")


class Stream:
    """Counts what waits for it."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


def test_a_step_is_warmed_up_and_recorded_on_a_stream_of_the_models_device(
    checkpoint: SaveModel,
    driver: LoadDriver,
    prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, current, used = list[Stream](), Stream("current"), list[Stream]()

    def new_stream(device: Any) -> Stream:
        streams.append(Stream(device))
        return streams[-1]

    @contextmanager
    def recording(_graph: Any, *, stream: Any, **_: Any) -> Iterator[None]:
        used.append(stream)
        yield

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        used.append(stream)
        yield

    cuda = SimpleNamespace(
        Stream=new_stream,
        stream=on,
        current_stream=lambda _device: current,
        graph=recording,
        graph_pool_handle=lambda: None,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
    )
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=cuda))
    plain, recorded = (driver(checkpoint("llama").directory) for _ in range(2))
    for engine in (plain, recorded):
        engine.start(0, prompt(9))
        engine.prefill(0)
    expected = plain.runner.hidden_states(plain.plan({0: 1}))
    runner = recorded.runner
    model, spec = runner.model, runner.model.spec
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    model.attention = KernelAttention(heads, torch.device("cpu"))
    graphs = DecodeGraphs(
        model,
        model.attention,
        runner._cache,
        max_num_seqs=4,
        max_model_len=64,
        scratch_block=len(runner._cache[0]) - 1,
    )
    runner._update(plan := recorded.plan({0: 1}))
    rows = batch_rows(plan, runner._table)
    with torch.inference_mode():
        states = graphs.run(rows, attention_rows(rows, runner._table))
    assert states is not None
    assert torch.allclose(states, expected, atol=1e-4)
    [own] = streams
    assert own.device == model.device
    assert used == [own, own]
    assert own.waited_for == [current]
    assert current.waited_for == [own]
