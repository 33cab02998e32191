"""Text, conversations and embeddings from a model in this process."""

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from fastapi import FastAPI

from engine.shared import settings
from engine.shared.devices import num_cuda_devices
from engine.shared.model_files import model_directory
from engine.shared.pooling import read_pooling
from server.api.chat.schema import ChatCompletionResponse
from server.api.completions.schema import CompletionResponse
from server.api.services import make_services
from server.api.vectors.schema import EmbeddingsResponse
from server.app import build_app
from server.config import ServeConfig
from server.config.commands import defaults_for
from server.media.served import placeholders_of, served_processor
from server.observe.metrics import FrontEndMetrics
from server.text.tokenizer import ServedTokenizer
from swell.local import LocalEngine

MAX_CONCURRENCY = 1024
"""Maximum prompts of one call in the engine at a time; the others wait here."""

_DATA, _DONE = b"data: ", b"[DONE]"

Q = TypeVar("Q")
T = TypeVar("T")
Message = Mapping[str, Any]


class RequestFailed(Exception):
    """A request was refused or failed; the fields are those of OpenAI's error."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            error = msgspec.json.decode(body)["error"]
        except (msgspec.DecodeError, KeyError, TypeError):
            error = {"message": body.decode(errors="replace")}
        super().__init__(error["message"])
        self.status = status
        """The HTTP status that a server would return."""
        self.param: str | None = error.get("param")
        self.code: str | None = error.get("code")


class AsyncLLM:
    """A model in this process, for asyncio; close it, or use it as an async context manager.

    Its methods accept the fields of the endpoints' bodies, with the same validation. Cancelling a
    call, or closing a stream, aborts its requests.
    """

    def __init__(self, app: FastAPI, engine: LocalEngine, tasks: tuple[str, ...]) -> None:
        self.supported_tasks = tasks
        """The model's task, in vLLM's terms: generate, embed or classify."""
        self._app = app
        self._engine = engine
        self._room = asyncio.Semaphore(MAX_CONCURRENCY)

    @classmethod
    async def start(cls, model: str | Path | None = None, **options: Any) -> Self:
        """Load a model; the bundled one by default.

        Args:
            model: directory or hub id.
            options: settings of `swell serve` by name, such as `max_model_len=4096`.

        Raises:
            SettingsError: there is no such setting, or its value is invalid.
            CannotStart, ValueError, OSError: the engine cannot start.
        """
        options.setdefault("data_parallel_size", 1)
        if model is not None:
            options["model"] = str(model)
        known = {each.name for each in settings.settings_of(ServeConfig)}
        for name in options:
            if name not in known:
                hint = settings.suggestion(name, known)
                raise settings.SettingsError(f"there is no setting {name!r}{hint}")
        config = settings.load(ServeConfig, options, {})
        defaults = defaults_for(config, num_cuda_devices())
        config = settings.load(ServeConfig, options, {}, defaults=defaults)
        _check_alone(config)
        directory = await asyncio.to_thread(
            model_directory, config.model, weights=config.model.load_format != "dummy"
        )
        processor = served_processor(directory)
        tokenizer = await asyncio.to_thread(
            ServedTokenizer.load, directory, config.model, placeholders_of(processor)
        )
        engine_config = config.engine().changed(parallel={"data_parallel_size_local": 1})
        loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(LocalEngine, engine_config, loop)
        front_end = config.front_end()
        pooling = read_pooling(directory, config.model)
        metrics = FrontEndMetrics(front_end)
        services = make_services(
            front_end, engine, tokenizer, metrics, pooling=pooling, processor=processor
        )
        tasks = ("generate",) if pooling is None else (pooling.task,)
        return cls(build_app(services), engine, tasks)

    async def close(self) -> None:
        """Abort all requests, and free the model."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- requests --------------------------------------------------------------------------------

    async def generate(self, prompt: str | list[int], **fields: Any) -> CompletionResponse:
        """Complete a prompt; `fields` are those of /v1/completions.

        Raises:
            RequestFailed: it was refused, or the engine failed.
        """
        body = await self.request("/v1/completions", {"prompt": prompt, **fields})
        return msgspec.json.decode(body, type=CompletionResponse)

    async def chat(self, messages: Sequence[Message], **fields: Any) -> ChatCompletionResponse:
        """Answer a conversation; `fields` are those of /v1/chat/completions.

        Raises:
            RequestFailed: it was refused, or the engine failed.
        """
        body = await self.request("/v1/chat/completions", {"messages": messages, **fields})
        return msgspec.json.decode(body, type=ChatCompletionResponse)

    async def embed(self, text: str | list[int], **fields: Any) -> list[float]:
        """Return the embedding of a text; `fields` are those of /v1/embeddings.

        Raises:
            RequestFailed: it was refused, or the engine failed.
        """
        body = await self.request("/v1/embeddings", {"input": text, **fields})
        vector = msgspec.json.decode(body, type=EmbeddingsResponse).data[0].embedding
        assert isinstance(vector, list), "other encodings are for clients over HTTP"
        return vector

    async def stream(
        self, path: str, fields: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of an endpoint's streamed answer.

        Raises:
            RequestFailed: it was refused, or the engine failed.
        """
        left = b""
        async with aclosing(self._parts(path, {**fields, "stream": True})) as parts:
            async for part in parts:
                *lines, left = (left + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(_DATA)
                    if data in (line, _DONE):
                        continue
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise RequestFailed(500, data)
                    yield event

    async def request(self, path: str, fields: Mapping[str, Any]) -> bytes:
        """Return the body of an endpoint's answer.

        Raises:
            RequestFailed: it was refused, or the engine failed.
        """
        async with self._room:
            return b"".join([part async for part in self._parts(path, fields)])

    async def _parts(self, path: str, fields: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Call an endpoint through ASGI; yield the parts of its answer."""
        body = msgspec.json.encode(fields)
        parts: asyncio.Queue[MutableMapping[str, Any] | Exception] = asyncio.Queue(1)
        sent = False
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await left.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "client": None,
            "server": None,
            "state": {},
        }

        async def serve() -> None:
            ended = Exception("the endpoint sent no answer")
            try:
                await self._app(scope, receive, parts.put)
            except Exception as error:
                ended = error
            await parts.put(ended)

        task = asyncio.ensure_future(serve())
        try:
            status, refusal = 200, b""
            while True:
                part = await parts.get()
                if isinstance(part, Exception):
                    raise part
                if part["type"] == "http.response.start":
                    status = part["status"]
                    continue
                if status == 200:
                    yield part.get("body", b"")
                else:
                    refusal += part.get("body", b"")
                if not part.get("more_body"):
                    break
            if status != 200:
                raise RequestFailed(status, refusal)
        finally:
            left.set()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class LLM:
    """A model in this process, for programs without asyncio; close it, or use it with `with`."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Load a model, as `AsyncLLM.start` does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self._llm = self._wait(AsyncLLM.start(model, **options))
        except BaseException:
            self._end()
            raise

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's task, in vLLM's terms: generate, embed or classify."""
        return self._llm.supported_tasks

    def generate(
        self, prompts: str | Sequence[str | list[int]], **fields: Any
    ) -> list[CompletionResponse]:
        """Complete prompts concurrently; `fields` are those of /v1/completions.

        Raises:
            RequestFailed: one was refused, or the engine failed; the others are aborted.
        """
        every = [prompts] if isinstance(prompts, str) else prompts
        return self._all(lambda each: self._llm.generate(each, **fields), every)

    def chat(
        self, conversations: Sequence[Message] | Sequence[Sequence[Message]], **fields: Any
    ) -> list[ChatCompletionResponse]:
        """Answer one conversation or several; `fields` are those of /v1/chat/completions.

        Raises:
            RequestFailed: one was refused, or the engine failed; the others are aborted.
        """
        every: Any = conversations
        if every and isinstance(every[0], Mapping):
            every = [every]
        return self._all(lambda each: self._llm.chat(each, **fields), every)

    def embed(self, texts: str | Sequence[str | list[int]], **fields: Any) -> list[list[float]]:
        """Return the embeddings of texts; `fields` are those of /v1/embeddings.

        Raises:
            RequestFailed: one was refused, or the engine failed; the others are aborted.
        """
        every = [texts] if isinstance(texts, str) else texts
        return self._all(lambda each: self._llm.embed(each, **fields), every)

    def close(self) -> None:
        """Abort all requests, and free the model."""
        if self._thread.is_alive():
            self._wait(self._llm.close())
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, call: Callable[[Q], Coroutine[Any, Any, T]], every: Iterable[Q]) -> list[T]:
        async def gather() -> list[T]:
            try:
                async with asyncio.TaskGroup() as group:
                    started = [group.create_task(call(each)) for each in every]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [each.result() for each in started]

        return self._wait(gather())

    def _wait(self, what: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _check_alone(config: ServeConfig) -> None:
    """Refuse settings that need `swell serve`."""
    parallel = config.parallel
    if parallel.data_parallel_size > 1 or parallel.processes > 1:
        raise settings.SettingsError(
            "data_parallel_size, tensor_parallel_size and pipeline_parallel_size have to be 1 in a "
            "program: use swell serve for several engines or processes"
        )
    cache = config.cache
    others = {
        "enable_lora": config.lora.enable_lora,
        "engine_backend": config.executor.engine_backend != "swell",
        "kv_role": cache.kv_role,
        "prefill_engines": cache.prefill_engines,
        "kv_transfer_config": cache.kv_transfer_config,
        "kv_events_config": cache.kv_events_config,
        "kv_memory_tier_bytes": cache.kv_memory_tier_bytes,
        "kv_disk_tier_dir": cache.kv_disk_tier_dir,
        "usage_report": config.supervisor.usage_report,
    }
    for name, is_set in others.items():
        if is_set:
            raise settings.SettingsError(f"{name} needs swell serve")
