"""KV blocks stored by a plugin's connector, such as a cache server or an object store."""

import logging
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.kv.block_store import BadBlock, seal
from engine.shared.config import EngineConfig
from engine.shared.plugins import instance_of, load_plugin

logger = logging.getLogger(__name__)

GROUP = "swell.kv_connectors"
"""Entry-point group of callables `(config: EngineConfig, options: dict)` that build a
`KvConnector`."""


@runtime_checkable
class KvConnector(Protocol):
    """Stores bytes by key. Methods are called from several threads, never from a computing one.

    Exceptions, and returned data other than what was saved, count as tier errors, and the block is
    recomputed. After 5 s its request stops waiting.
    """

    def load(self, key: bytes) -> bytes | None:
        """Return the data saved under a key, or None."""
        ...

    def save(self, key: bytes, data: bytes) -> bool:
        """Save data of kilobytes to megabytes; return False if it exists or is rejected."""
        ...

    def clear(self, model: bytes) -> None:
        """Delete all entries whose keys start with `model`."""
        ...

    def close(self) -> None:
        """Release the connector."""
        ...


class Connector(NamedTuple):
    """A configured connector."""

    name: str
    options: dict[str, Any]


class ConnectedStore:
    """Adapts a plugin's connector to a store of the tiers.

    Raises:
        BadPlugin: it is not installed, or cannot be opened.
    """

    def __init__(self, connector: Connector, config: EngineConfig) -> None:
        is_connector = instance_of(KvConnector)  # type: ignore[type-abstract]
        self._connector = load_plugin(
            GROUP,
            connector.name,
            "--kv-transfer-config: kv_connector",
            lambda make: is_connector(make(config, connector.options)),
        )
        self.clear = self._connector.clear

    def read(self, key: bytes) -> bytes | None:
        """Return a block's content, or None if it is missing.

        Raises:
            BadBlock: it is not what was written.
        """
        data = self._connector.load(key)
        if data is None:
            return None
        content = data[len(seal(key, b"")) :]
        if data != seal(key, content) + content:
            raise BadBlock("a connector returned other data than was saved")
        return content

    def write(self, key: bytes, content: bytes) -> bool:
        """Store a block; return whether it was written."""
        return self._connector.save(key, seal(key, content) + content)

    def close(self) -> None:
        """Close the connector; errors are only logged."""
        try:
            self._connector.close()
        except Exception:
            logger.exception("a KV connector could not be closed")
