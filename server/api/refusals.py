"""Fields that would change what a request means and are not served: refused, never ignored."""

from typing import Any

import msgspec
from pydantic import BaseModel

from server.api.chat.schema import BatchChatRequest, ChatCompletionRequest
from server.api.classify.schema import ClassifyRequest
from server.api.compatibility import (
    CHAT,
    CHATS,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    Row,
    Rows,
)
from server.api.completions.schema import CompletionRequest
from server.api.embeddings.schema import EmbeddingsRequest
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.pooling.schema import PoolingRequest
from server.api.responses.schema import ResponsesRequest
from server.api.scores.schema import RerankRequest, ScoreRequest
from server.api.tokenize.schema import DetokenizeRequest, TokenizeRequest
from server.http.errors import invalid

REQUESTS: dict[type[BaseModel], Rows] = {
    ChatCompletionRequest: CHAT,
    BatchChatRequest: CHATS,
    CompletionRequest: COMPLETIONS,
    ResponsesRequest: RESPONSES,
    MessagesRequest: MESSAGES,
    CountTokensRequest: COUNT_TOKENS,
    EmbeddingsRequest: EMBEDDINGS,
    PoolingRequest: POOLING,
    ClassifyRequest: CLASSIFY,
    ScoreRequest: SCORE,
    RerankRequest: RERANK,
    TokenizeRequest: TOKENIZE,
    DetokenizeRequest: DETOKENIZE,
}
_NULL = msgspec.Raw(b"null")
_LONGEST_NEUTRAL = 32
"""Bytes of a value that may ask for nothing."""


def _decoder(rows: Rows) -> "msgspec.json.Decoder[Any]":
    """Return what reads the refused fields of a body, and skips all others."""
    fields = [(name, msgspec.Raw, _NULL) for name, row in rows.items() if row.state == "refused"]
    return msgspec.json.Decoder(msgspec.defstruct("Refused", fields))


_DECODERS = {model: _decoder(rows) for model, rows in REQUESTS.items()}
_NOTHING = {model: decoder.decode(b"{}") for model, decoder in _DECODERS.items()}


def refuse_unserved(model: type[BaseModel], body: bytes) -> None:
    """Check that a body, which is valid otherwise, has no field that cannot be ignored.

    Raises:
        ApiError: it has one; `param` names it.
    """
    decoder = _DECODERS.get(model)
    if decoder is None:
        return
    try:
        found = decoder.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="bad_json") from error
    if found == _NOTHING[model]:
        return  # as nearly all bodies, without a look at each of a hundred fields
    for name in found.__struct_fields__:
        value = getattr(found, name)
        row = REQUESTS[model][name]
        if value is not _NULL and not _asks_for_nothing(bytes(value), row):
            raise invalid(f"{name}: {row.why}", name)


def _asks_for_nothing(text: bytes, row: Row) -> bool:
    if len(text) > _LONGEST_NEUTRAL:
        return False
    value = msgspec.json.decode(text)
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in row.neutral
    )
