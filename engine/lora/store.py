"""The adapters that an engine has read, loaded in a separate thread during steps."""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from engine.lora.adapter_config import BadAdapter
from engine.lora.files import AdapterFiles, read_adapter, resolve_adapter

logger = logging.getLogger(__name__)

W = TypeVar("W")


class AdapterStore(Generic[W], Mapping[str, W]):
    """The adapters that an executor can use, by version.

    Adapters with equal content are stored once. `load` and `drop` are called from the engine's
    loop; lookups come from the stepping thread.
    """

    def __init__(self, max_size: int, convert: Callable[[AdapterFiles], W]) -> None:
        """Create a store of adapters for a model.

        Args:
            max_size: maximum bytes of an adapter's weights.
            convert: checks an adapter and converts it for the executor; can raise BadAdapter.
        """
        self.on_settled: Callable[[], None] | None = None
        """Called in the loading thread when an adapter has been loaded or has failed."""
        self._max_size = max_size
        self._convert = convert
        self._weights: dict[str, W] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def __getitem__(self, version: str) -> W:
        return self._weights[version]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._weights))

    def __len__(self) -> int:
        return len(self._weights)

    def load(self, path: str, root: str | None) -> "Future[str]":
        """Start loading an adapter's directory; the future holds its version or BadAdapter.

        Args:
            root: directory that must contain it; None: no restriction.
        """
        loading = self._thread.submit(self._read, path, root)
        loading.add_done_callback(lambda _: self.on_settled and self.on_settled())
        return loading

    def drop(self, version: str) -> None:
        """Remove an adapter that is no longer used."""
        self._weights.pop(version, None)

    def shutdown(self) -> None:
        """Stop the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str, root: str | None) -> str:
        try:
            directory = resolve_adapter(path, root)
            files = read_adapter(directory, root, self._max_size)
            if files.version not in self._weights:
                self._weights[files.version] = self._convert(files)
            return files.version
        except BadAdapter:
            raise
        except Exception as error:
            logger.exception("the adapter %s could not be read", path)
            raise BadAdapter(f"{type(error).__name__} while reading it") from error
