"""A small real tokenizer, a scripted generation client, and an app over both."""

import asyncio
import contextlib
import inspect
import random
import socket
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import msgspec
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.shared.config import ModelConfig
from engine.shared.messages import (
    AdapterOutcome,
    AddRequest,
    ClusterView,
    FleetRequest,
    RequestOutput,
    TokenLogprob,
    UtilityResult,
    UtilityValue,
)
from engine.shared.pooling import PoolingSpec
from server.api.services import make_services
from server.app import build_app
from server.config import FrontEndConfig, GuardConfig, HttpConfig
from server.generate import grammar_check
from server.generate.grammar_process import NOTHING
from server.helper_process import HelperProcess
from server.observe.metrics import FrontEndMetrics
from server.router.adapters import Adapters
from server.router.generation_client import KvOffer, NoEngineAvailable
from server.router.token_stream import RequestStream, UnreadOutputs
from server.store.service import ResponseStore
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer
from tests.server.endpoints import ADMIN_KEY
from tests.server.tokens import id_of
from tests.support import chromium
from tests.support.stores import sqlite_backend
from tests.support.waiting import PATIENCE

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a stream of tokens is a stream of text: hello world, hello again",
    "naïve café, 你好世界, こんにちは, 🙂🚀👩‍👩‍👧",
]


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer with a few merges and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("«mark»", special=False)])
    return tokenizer


RunLoop: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


def logprob_of(token_id: int, alternatives: int, named: Sequence[int] = ()) -> TokenLogprob:
    """Return made-up scores that depend on the token only."""
    ids = list(named) or [(token_id + step) % 330 for step in range(alternatives)]
    return TokenLogprob(-0.25 - token_id / 1000, 1, ids, [-0.25 - i / 1000 for i in ids])


@pytest.fixture(autouse=True)
def run_loop() -> RunLoop:
    """Return the hook that runs coroutine tests."""
    return asyncio.run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    run: Any = pyfuncitem.funcargs["run_loop"]
    run(test)
    return True


class FakeStream(RequestStream):
    """A token stream fed by its test or by the client's script."""

    def __init__(
        self, message: AddRequest, id_: int, pinned_rank: int | None, unread: UnreadOutputs | None
    ) -> None:
        message = msgspec.structs.replace(message, id=id_)
        super().__init__(message, lambda _: self.closed.set(), pinned_rank, unread)
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.sampling = message.sampling
        self.priority = message.priority
        self.pinned_rank = pinned_rank
        self.message = message
        self.tenant = message.tenant
        self.cache_root = message.cache_root
        self.pooling = message.pooling
        self.group = message.group
        self.adapter = message.adapter
        self.encoder_inputs = message.encoder_inputs
        self.times.sent(0, time.monotonic())
        self.closed = asyncio.Event()

    def feed(self, *outputs: RequestOutput | Exception) -> None:
        for output in outputs:
            if isinstance(output, Exception):
                self.fail(output)
                continue
            if output.timing is not None:
                last = output.finish_reason is not None
                self.times.record_timing(output.timing, time.monotonic(), last=last)
            self.put(output)

    def put(self, output: RequestOutput) -> None:
        """Add an output, without merging it with others."""
        self._pieces.append(output)
        self.unread.arrived(self, output)

    def take(self) -> tuple[RequestOutput, bool]:
        return self._pieces.pop(0), bool(self._pieces)

    @property
    def is_awaited(self) -> bool:
        """Whether a reader waits for the next output."""
        return self.unread._waiter is not None


Script = Callable[[FakeStream], Sequence[RequestOutput | Exception]]


class FakeGenerationClient:
    """Answers every sequence according to its script."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self.tokenizer = tokenizer
        self.ready = True
        self.engines_came = asyncio.Event()
        self.engines_came.set()
        self.context = 512
        self.view: ClusterView | None = None
        self.stats_age: dict[int, float] = {}
        self.view_age: float | None = None
        self.num_slots = 4
        self.serves_images = True
        self.needs_original_images = False
        self.adapters = Adapters(0, 1)
        self.changes: list[tuple[str, str | None, bool]] = []
        self.outcome = AdapterOutcome(1, 200)
        self.offers: dict[int, KvOffer] = {}
        self.utilities: list[tuple[int | None, str, dict[str, Any]]] = []
        self.streams: list[FakeStream] = []
        self.submitted = asyncio.Event()
        self.orders: list[FleetRequest] = []
        self.fleet_error = ""
        self.refuse_from = 10**9
        self.script: Script = self.answer("hello world")

    @property
    def max_model_len(self) -> int:
        if not self.ready:
            raise NoEngineAvailable
        return self.context

    async def change_adapter(
        self, name: str, path: str | None = None, in_place: bool = False
    ) -> AdapterOutcome:
        self.changes.append((name, path, in_place))
        return self.outcome

    def weight_version(self, rank: int) -> str:
        return ""

    @property
    def kv_offers(self) -> dict[int, KvOffer]:
        return self.offers

    async def call_utility(
        self, rank: int | None, name: str, arguments: dict[str, Any], within: float = 120.0
    ) -> list[UtilityResult]:
        self.utilities.append((rank, name, arguments))
        ranks = [0, 1] if rank is None else [rank]
        if name == "unknown":
            return [UtilityResult(1, each, error="engines have no utility") for each in ranks]
        return [UtilityResult(1, each, {"blocks_forgotten": 7}) for each in reversed(ranks)]

    async def order_fleet(self, request: FleetRequest) -> list[UtilityResult]:
        self.orders.append(request)
        info: dict[str, UtilityValue] = {"is_paused": True, "fleet_error": self.fleet_error}
        return [UtilityResult(1, rank, info) for rank in (0, 1)]

    @property
    def reaches_engines(self) -> bool:
        return self.engines_came.is_set()

    async def wait_for_engines(self) -> None:
        await self.engines_came.wait()

    def check_accepts_requests(self) -> None:
        if not self.ready:
            raise NoEngineAvailable("No engine can serve now; try again.")

    def submit(
        self,
        message: AddRequest,
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> FakeStream:
        if len(self.streams) >= self.refuse_from:
            raise NoEngineAvailable
        stream = FakeStream(message, len(self.streams) + 1, pinned_rank, unread)
        self.streams.append(stream)
        stream.feed(*self.script(stream))
        self.submitted.set()
        return stream

    def answer(self, text: str, *, cut: Callable[[int], int] = lambda left: 1) -> Script:
        """Return a script that generates `text` and the end token, in outputs of `cut` tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokens(ids, cut=cut)

    def tokens(self, ids: Sequence[int], *, cut: Callable[[int], int] = lambda left: 1) -> Script:
        """The same for token ids."""
        end = min(self.tokenizer.eos_token_ids)

        def script(stream: FakeStream) -> list[RequestOutput]:
            sampling = stream.sampling
            wanted = [*ids, end][: sampling.max_tokens]
            reason = "stop" if len(wanted) > len(ids) else "length"
            outputs: list[RequestOutput] = []
            while wanted:
                size = cut(len(wanted))
                part, wanted = wanted[:size], wanted[size:]
                first = not outputs
                outputs.append(
                    RequestOutput(
                        id=len(self.streams),
                        token_ids=part,
                        finish_reason=None if wanted else reason,  # type: ignore[arg-type]
                        stop_token_id=end if not wanted and reason == "stop" else None,
                        logprobs=None
                        if sampling.logprobs is None
                        else [
                            logprob_of(each, sampling.logprobs, sampling.logprob_token_ids)
                            for each in part
                        ],
                        prompt_logprobs=None
                        if sampling.prompt_logprobs is None or not first
                        else [
                            logprob_of(token_id, sampling.prompt_logprobs)
                            for token_id in stream.prompt_token_ids[1:]
                        ],
                        num_cached_tokens=3 if first else 0,
                    )
                )
            return outputs

        return script

    def random_cuts(self, seed: int) -> Callable[[int], int]:
        """Return a cut of random sizes."""
        generator = random.Random(seed)
        return lambda left: generator.randint(1, max(1, left))


def tokenizer_with(backend: Tokenizer, template: str, *added: AddedToken) -> ServedTokenizer:
    """Return a tokenizer with a chat template and additional tokens."""
    own = Tokenizer.from_str(backend.to_str())
    own.add_tokens(list(added))
    return ServedTokenizer(
        own,
        eos_token_ids=[id_of(own, "<|eos|>")],
        chat_template=ChatTemplate(template, {}),
    )


def prompt_of(engines: Any) -> str:
    """Return the text of the last prompt that was sent to scripted engines."""
    ids = engines.streams[-1].prompt_token_ids
    return str(engines.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return ServedTokenizer(
        backend,
        eos_token_ids=[id_of(backend, "<|eos|>")],
        chat_template=ChatTemplate(TEMPLATE, {"eos_token": "<|eos|>"}),
    )


@pytest.fixture
def config() -> FrontEndConfig:
    return FrontEndConfig(
        model=ModelConfig(model="org/tiny", served_model_name=("tiny", "also-tiny")),
        http=HttpConfig(max_logprobs=5),
    )


@pytest.fixture
def engines(tokenizer: ServedTokenizer) -> FakeGenerationClient:
    return FakeGenerationClient(tokenizer)


@pytest.fixture(scope="session", autouse=True)
def grammar_process() -> Iterator[None]:
    """A grammar checker process shared by all apps, because it is slow to start."""
    process, turn = HelperProcess(grammar_check._PROCESS, NOTHING), threading.Lock()

    class Shared:
        def __init__(self, *_: object) -> None:
            pass

        def answer(self, job: bytes, seconds: float) -> bytes | None:
            with turn:
                return process.answer(job, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_check, "HelperProcess", Shared)
        yield
    process.end()


@pytest.fixture
def front_end_metrics(config: FrontEndConfig) -> FrontEndMetrics:
    return FrontEndMetrics(config)


@pytest.fixture
def app(
    config: FrontEndConfig,
    engines: FakeGenerationClient,
    tokenizer: ServedTokenizer,
    front_end_metrics: FrontEndMetrics,
) -> FastAPI:
    return build_app(make_services(config, engines, tokenizer, front_end_metrics))


def tiny(**settings: Any) -> FrontEndConfig:
    """Return the settings of a front end that serves the model `tiny`."""
    model = ModelConfig(model="org/tiny", served_model_name=("tiny",))
    return FrontEndConfig(model=model, **settings)


def app_of(
    config: FrontEndConfig, engines: Any, tokenizer: ServedTokenizer, **services: Any
) -> FastAPI:
    """Return the app of a front end with these settings and services."""
    return build_app(make_services(config, engines, tokenizer, FrontEndMetrics(config), **services))


@pytest.fixture
def whole_app(
    config: FrontEndConfig,
    engines: FakeGenerationClient,
    tokenizer: ServedTokenizer,
    tmp_path: Path,
) -> Iterator[FastAPI]:
    """An app with all endpoints, including admin endpoints."""
    settings = msgspec.structs.replace(
        config,
        guards=GuardConfig(admin_key=ADMIN_KEY),
        http=msgspec.structs.replace(config.http, enable_tokenizer_info_endpoint=True),
    )
    store = ResponseStore(sqlite_backend(tmp_path / "whole.sqlite", 1 << 24, 3600.0))
    yield app_of(settings, engines, tokenizer, store=store)
    store.close()


class Http:
    """A synchronous client of an app: every call runs its own event loop."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://swell") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a successful completion."""
        response = self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a successful chat completion."""
        messages = [{"role": "user", "content": "hello"}]
        response = self.post(
            "/v1/chat/completions", {"model": "tiny", "messages": messages, **fields}
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream that ends normally."""
        response = self.post(path, {"model": "tiny", "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return self.events(response.text)

    @staticmethod
    def events(text: str) -> list[dict[str, Any]]:
        """Parse a stream; check that it contains only events and ends with [DONE] or an error."""
        *frames, end = text.split("\n\n")
        assert end == ""
        if not frames[-1].startswith('data: {"error":'):
            assert frames.pop() == "data: [DONE]"
        assert all(frame.startswith("data: ") for frame in frames)
        return [msgspec.json.decode(frame.removeprefix("data: ")) for frame in frames]


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    """A browser for the tests of a module that `needs_chromium`."""
    program = chromium.find()
    assert program is not None
    with chromium.Browser(program) as opened:
        yield opened


@pytest.fixture
def http(app: FastAPI) -> Http:
    return Http(app)


@pytest.fixture
def http_of(
    engines: FakeGenerationClient, tokenizer: ServedTokenizer
) -> Callable[[FrontEndConfig], Http]:
    """Return a function that creates a client of an app with other settings."""
    return lambda config: Http(app_of(config, engines, tokenizer))


VECTOR_SIZE = 8


def vector_of(token_ids: Sequence[int], size: int = VECTOR_SIZE) -> list[float]:
    """Return the scripted engines' vector of a sequence; it grows with the length."""
    return [float(len(token_ids)), *map(float, token_ids[: size - 1])] + [0.0] * (
        size - 1 - len(token_ids[: size - 1])
    )


def vectors(size: int) -> Script:
    """Return a script that answers each sequence with its vector."""

    def script(stream: FakeStream) -> list[RequestOutput]:
        ids = stream.prompt_token_ids
        each = stream.pooling is not None and stream.pooling.per_token
        parts = [[token_id] for token_id in ids] if each else [ids]
        pooled = b"".join(array("f", vector_of(part, size)).tobytes() for part in parts)
        return [RequestOutput(stream.id, [], "stop", pooled=pooled)]

    return script


def framed(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer that encloses texts in special tokens, like BERT's."""
    own = Tokenizer.from_str(backend.to_str())
    first, last = ("<|user|>", own.token_to_id("<|user|>")), ("<|end|>", own.token_to_id("<|end|>"))
    own.post_processor = processors.TemplateProcessing(
        single="<|user|> $A <|end|>",
        pair="<|user|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[first, last],
    )
    return own


@pytest.fixture
def pooling_http(
    config: FrontEndConfig, engines: FakeGenerationClient, backend: Tokenizer
) -> Callable[..., Http]:
    """Return a function that creates a client of an app with a pooling model."""

    def make(config: FrontEndConfig = config, **fields: Any) -> Http:
        given: dict[str, Any] = {"task": "embed", "pooling": "mean", "size": VECTOR_SIZE} | fields
        if given["task"] == "classify":
            given.setdefault("labels", tuple(f"LABEL_{i}" for i in range(given["size"])))
        spec = PoolingSpec(**given)
        engines.script = vectors(spec.size)
        tokenizer = ServedTokenizer(framed(backend), eos_token_ids=[0])
        return Http(app_of(config, engines, tokenizer, pooling=spec))

    return make


Served = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture
def served() -> Served:
    """Return a function that serves an app on a free port in a thread, like a front end.

    The further arguments are called at the end, on the app's event loop.
    """

    @contextlib.contextmanager
    def serve(app: FastAPI, *endings: Callable[[], Awaitable[None]]) -> Iterator[str]:
        server = uvicorn.Server(
            uvicorn.Config(
                app, http="httptools", log_level="warning", lifespan="off",
                timeout_keep_alive=600,  # a client's next request may be late
            )
        )  # fmt: skip
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(128)

            async def run() -> None:
                await server.serve(sockets=[listening])
                for end in endings:
                    await end()

            thread = threading.Thread(target=lambda: uvloop.run(run()), daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(PATIENCE)
                assert not thread.is_alive()

    return serve
