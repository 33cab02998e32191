"""The adapters that an engine has in memory, read beside its steps in a thread of their own."""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from engine.lora.adapter_config import BadAdapter
from engine.lora.files import AdapterFiles, read_adapter, resolve_adapter
from engine.lora.modules import AdaptableModules, ModulePair

logger = logging.getLogger(__name__)

W = TypeVar("W")


class AdapterStore(Generic[W], Mapping[str, W]):
    """The adapters that an executor can put into slots, by version.

    Adapters of equal content are one. `load` and `drop` are called from the engine's loop, lookups
    come from the thread of the steps.
    """

    def __init__(
        self,
        modules: AdaptableModules,
        max_rank: int,
        convert: Callable[[AdapterFiles, list[ModulePair]], W],
    ) -> None:
        """Read adapters for a model.

        Args:
            convert: makes what the executor takes; it may raise BadAdapter.
        """
        self.on_settled: Callable[[], None] | None = None
        """Called when an adapter has been read or cannot be, in the reading thread."""
        self._modules = modules
        self._max_rank = max_rank
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
        """Begin to read an adapter's directory; return its version, or BadAdapter, once it is read.

        Args:
            root: below which it has to lie; None: anywhere.
        """
        loading = self._thread.submit(self._read, path, root)
        loading.add_done_callback(lambda _: self.on_settled and self.on_settled())
        return loading

    def drop(self, version: str) -> None:
        """Forget an adapter that nobody uses any more."""
        self._weights.pop(version, None)

    def shutdown(self) -> None:
        """End the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str, root: str | None) -> str:
        try:
            directory = resolve_adapter(path, root)
            files = read_adapter(directory, root, self._modules.max_size(self._max_rank))
            pairs = self._modules.pairs(files, self._max_rank)
            if files.version not in self._weights:
                self._weights[files.version] = self._convert(files, pairs)
            return files.version
        except BadAdapter:
            raise
        except Exception as error:
            logger.exception("the adapter %s could not be read", path)
            raise BadAdapter(f"{type(error).__name__} while it was read") from error
