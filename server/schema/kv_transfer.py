"""Parameters for transferring a prompt's KV blocks between servers, with vLLM's names."""

from typing import Annotated

import msgspec
from pydantic import Field

from server.schema.body import Name, RequestBody


class KvTransferParams(RequestBody):
    """Parameters of a request: from an external router to the prefill or the decode server."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_block_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    remote_host: Name | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    remote_request_id: Name | None = None
    tp_size: Annotated[int, Field(ge=1, le=1024)] | None = None


class RemoteKvBlocks(msgspec.Struct):
    """Parameters in a prefill server's response, to be sent to the decode server."""

    remote_engine_id: str
    """Of the engine process that has computed the prompt."""
    remote_block_ids: list[int]
    """Which of the prompt's blocks it offers: their names follow from its tokens."""
    remote_request_id: str
    remote_host: str
    remote_port: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    tp_size: int = 1
