"""Run in vLLM's environment: when requests that must run alone begin, beside others with images.

Prints, as JSON and after each part, the ids of which preparation began and those in vLLM's
scheduler. vLLM's scheduler and processor are stand-ins; `VllmCore` is real.
"""

import json
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from engine.core.events import FrontEndJoined
from engine.core.front_ends import FrontEnds
from engine.core.halting import Halting
from engine.core.wave_clock import WaveClock
from engine.shared.messages import (
    AbortRequests,
    AddRequest,
    EncoderInput,
    EngineCounters,
    SamplingParams,
)
from engine.vllm import core as tested
from engine.vllm.requests import Continuation


class Images:
    """Prepares an image when it is told to."""

    def __init__(self) -> None:
        self.under_way: dict[int, Any] = {}
        self.began: list[int] = []
        self.ready: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way)

    def start(self, message: AddRequest, wanted: Any) -> None:
        self.under_way[message.id] = wanted
        self.began.append(message.id)

    def forget(self, request_id: int) -> None:
        self.under_way.pop(request_id, None)

    def done(self, *, idle: bool) -> list[tuple[int, "Future[Any]"]]:
        found = []
        for each in self.ready & self.under_way.keys():
            future: Future[Any] = Future()
            future.set_result(self.under_way.pop(each))
            found.append((each, future))
        return found


class Core:
    """vLLM's engine core, which computes nothing."""

    batch_queue = None

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.requests), running=[], get_kv_cache_usage=lambda: 0.0
        )

    def preprocess_add_request(self, wanted: Any) -> tuple[Any, int]:
        return SimpleNamespace(**vars(wanted), structured_output_request=None), 0

    def add_request(self, request: Any) -> None:
        self.requests.append(request.request_id)

    def abort_requests(self, names: list[str]) -> None:
        self.requests = [each for each in self.requests if each not in names]

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        return {}, False

    def post_step(self, executed: bool) -> None:
        pass


def wanted(message: AddRequest, *_: Any) -> Any:
    """Stand in for `core_request`."""
    sampling = SimpleNamespace(verify=lambda *_: None)
    return SimpleNamespace(
        request_id=str(message.id), sampling_params=sampling, pooling_params=None
    )


def core() -> tuple[Any, Images]:
    """Return a core that is not loaded, and what prepares its images."""
    made: Any = object.__new__(tested.VllmCore)
    made._images = images = Images()
    made.setup, made.vocab_size = SimpleNamespace(max_model_len=100), 100
    made._generation, made._tokenizer, made._continuation = {}, None, Continuation.COUNTED
    made._config = SimpleNamespace(
        model_config=None,
        speculative_config=None,
        structured_outputs_config=None,
        lora_config=None,
    )
    made._core, made.halting, made._front_ends = Core(), Halting(), FrontEnds()
    made._counters, made._sequences, made._held = EngineCounters(), {}, deque()
    made._admits, made._exclusive_request, made._exclusive_steps, made._uncomputed = True, 0, 0, 0
    made._rank, made._incarnation, made._clock = 0, 1, WaveClock(0)
    made._num_steps, made._version = 0, 0
    made._pooling = None
    made._loaded, made.adapters = {}, SimpleNamespace(keeps_unlisted=False)
    made.weights = SimpleNamespace(version="")
    made.handle(FrontEndJoined(0, 1))
    return made, images


def add(to: Any, request_id: int, *, shows: bool = False, alone: int = 0) -> None:
    """Add a request, with an image if `shows`."""
    inputs = [EncoderInput(0, 1, bytes([request_id]) * 16, 1, 1, b"rgb")] if shows else []
    sampling = SamplingParams(max_tokens=4, seed=0)
    to.handle(
        AddRequest(
            request_id, "x", 0, 0, [1, 2], sampling, encoder_inputs=inputs, exclusive_steps=alone
        )
    )


def main() -> None:
    """Let a suspect wait for an image that is being prepared, and others for the suspect."""
    vars(tested).update(core_request=wanted, refusal=lambda *_, **__: None)
    engine, images = core()
    add(engine, 1, shows=True)
    add(engine, 2, shows=True, alone=2)
    add(engine, 3, shows=True)
    add(engine, 4)
    engine.step()
    seen = [[list(images.began), list(engine._core.requests)]]
    images.ready = {1, 2, 3}
    engine.step()
    engine.handle(AbortRequests([1]))
    for _ in range(3):
        engine.step()
    seen.append([list(images.began), list(engine._core.requests)])
    engine.handle(AbortRequests([2]))
    for _ in range(3):
        engine.step()
    seen.append([list(images.began), list(engine._core.requests)])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
