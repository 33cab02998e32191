"""Blocks in a place of a plugin's: another cache server, an object store."""

import logging
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.kv_tiers.block_store import BadBlock, seal
from engine.shared.config import EngineConfig
from engine.shared.plugins import instance_of, load_plugin

logger = logging.getLogger(__name__)

GROUP = "swell.kv_connectors"
"""Of entry points: callables `(config: EngineConfig, options: dict)` that make a `KvConnector`."""


@runtime_checkable
class KvConnector(Protocol):
    """Keeps bytes by name. Its methods are called by several threads, never by one that computes.

    What it raises, and what it returns that is not what was saved, counts as an error of the tiers:
    the block is computed. One that takes over 5 s keeps its request waiting no longer.
    """

    def load(self, key: bytes) -> bytes | None:
        """Return what was saved under a key, or None."""
        ...

    def save(self, key: bytes, data: bytes) -> bool:
        """Save data of some kilobytes to megabytes; False if that is there, or not taken."""
        ...

    def clear(self, model: bytes) -> None:
        """Forget everything whose key begins so."""
        ...

    def close(self) -> None:
        """End the use."""
        ...


class Connector(NamedTuple):
    """A connector that is asked for."""

    name: str
    options: dict[str, Any]


class ConnectedStore:
    """A plugin's connector as one of the stores of the tiers.

    Raises:
        BadPlugin: it is not installed, or cannot be opened.
    """

    def __init__(self, asked: Connector, config: EngineConfig) -> None:
        is_connector = instance_of(KvConnector)  # type: ignore[type-abstract]
        self._connector = load_plugin(
            GROUP,
            asked.name,
            "--kv-transfer-config: kv_connector",
            lambda make: is_connector(make(config, asked.options)),
        )
        self.clear = self._connector.clear

    def read(self, key: bytes) -> bytes | None:
        """Return a block's content, or None if it is not there.

        Raises:
            BadBlock: it is not what was written.
        """
        data = self._connector.load(key)
        if data is None:
            return None
        content = data[len(seal(key, b"")) :]
        if data != seal(key, content) + content:
            raise BadBlock("a connector returned something else than was saved")
        return content

    def write(self, key: bytes, content: bytes) -> bool:
        """Keep a block; return whether it was written."""
        return self._connector.save(key, seal(key, content) + content)

    def close(self) -> None:
        """End the use; an error in that is logged and holds up nothing else."""
        try:
            self._connector.close()
        except Exception:
            logger.exception("a KV connector could not be closed")
