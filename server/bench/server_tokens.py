"""What the target says about itself and its tokens, asked before the load begins."""

import asyncio
from typing import Any, TypeVar

import msgspec

from server.bench.config import BenchError
from server.bench.connection import BadAnswer, HttpClient

T = TypeVar("T")

_TIMEOUT_SECONDS = 60
_AT_ONCE = 16


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


class _Whole:
    """Collects a whole answer."""

    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []

    def begin(self, status: int) -> None:
        self.status = status

    def data(self, body: bytes, now: float) -> None:
        self.parts.append(body)


class ServerTokens:
    """Tokenizes with the server's own tokenizer, so that none has to be installed here."""

    def __init__(self, client: HttpClient, model: str | None = None) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.model = model

    async def find_model(self) -> str:
        """Return the model to ask for: the first that the server lists if none was named.

        Raises:
            BenchError: it lists none.
        """
        if self.model is None:
            models = await self._ask("GET", "/v1/models", None, _Models)
            if not models.data:
                raise self._failed("the server lists no model: name one with --model")
            self.model = str(models.data[0].get("id"))
        return self.model

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens.

        Raises:
            BenchError: the server has no /tokenize.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return (await self._ask("POST", "/tokenize", body, _Tokens)).tokens

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            BenchError: the server has no /detokenize.
        """
        body = {"model": self.model, "tokens": token_ids}
        return (await self._ask("POST", "/detokenize", body, _Text)).prompt

    async def _ask(self, method: str, path: str, body: Any, answer: type[T]) -> T:
        whole = _Whole()
        payload = b"" if body is None else msgspec.json.encode(body)
        try:
            async with self._slots, asyncio.timeout(_TIMEOUT_SECONDS):
                await self._client.request(method, path, payload, whole)
        except (OSError, BadAnswer) as error:
            raise self._failed(f"{method} {path}: {error or type(error).__name__}") from error
        text = b"".join(whole.parts)
        if whole.status != 200:
            reason = text[:200].decode("utf-8", "replace")
            raise self._failed(f"{method} {path} answered {whole.status}: {reason}")
        try:
            return msgspec.json.decode(text, type=answer)
        except msgspec.DecodeError as error:
            raise self._failed(f"{method} {path}: {error}") from error

    def _failed(self, why: str) -> BenchError:
        return BenchError(f"{self._client.url}: {why}")
