"""Adapters in the processes of vLLM's executor."""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.lora.request import LoRARequest

from engine.lora.adapter_config import BadAdapter
from engine.lora.files import read_adapter, resolve_adapter
from engine.shared.messages import AdapterLoad
from engine.vllm.outputs import Sequence

logger = logging.getLogger(__name__)

_MAX_SIZE = 4 << 30
"""Maximum bytes of an adapter's weights."""


class VllmAdapters(Mapping[str, LoRARequest]):
    """The adapters that requests can use, by version; see `AdapterManager`.

    A background thread checks the files. vLLM then reads them on its own, in the engine's thread
    between two steps, so that an adapter that it cannot load fails no step.

    Args:
        core: vLLM's `EngineCore`.
        sequences: the engine's requests.
        max_rank: maximum rank of an adapter.
    """

    def __init__(self, core: Any, sequences: Mapping[int, Sequence], max_rank: int) -> None:
        self.on_settled: Callable[[], None] | None = None
        """Called in the background thread when the files of an adapter have been checked."""
        self._core, self._sequences, self._max_rank = core, sequences, max_rank
        self._requests: dict[str, LoRARequest] = {}
        self._paths: dict[str, str] = {}
        self._last_id = 0
        self._thread = ThreadPoolExecutor(1, "adapters")

    def __getitem__(self, version: str) -> LoRARequest:
        return self._requests[version]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def load(self, path: str, root: str | None) -> "Future[str]":
        """Start checking an adapter's files; the future holds its version or BadAdapter."""
        checked = self._thread.submit(self._check, path, root)
        checked.add_done_callback(lambda _: self.on_settled and self.on_settled())
        return checked

    def _check(self, path: str, root: str | None) -> str:
        directory = resolve_adapter(path, root)
        files = read_adapter(directory, root, _MAX_SIZE)
        rank = max([files.config.r, *files.config.rank_pattern.values()])
        if rank > self._max_rank:
            raise BadAdapter(f"its rank is {rank}: above --max-lora-rank {self._max_rank}")
        self._paths[files.version] = str(directory)
        return files.version

    def hold(self, version: str) -> None:
        """Load an adapter into vLLM; idempotent.

        Raises:
            BadAdapter: vLLM cannot load it.
        """
        if version in self._requests:
            return
        self._last_id += 1
        request = LoRARequest(version, self._last_id, self._paths[version])
        try:
            self._core.add_lora(request)
        except Exception as error:
            logger.exception("vLLM cannot load the adapter in %s", request.lora_path)
            raise BadAdapter(f"vLLM: {str(error)[:500] or type(error).__name__}") from error
        self._requests[version] = request

    def drop(self, version: str) -> None:
        """Remove an adapter that no request uses; idempotent."""
        if (request := self._requests.pop(version, None)) is not None:
            self._core.remove_lora(request.lora_int_id)

    def is_used(self, version: str) -> bool:
        """Return whether any request uses an adapter."""
        return any(each.message.adapter == version for each in self._sequences.values())

    def in_use(self) -> AdapterLoad:
        """Return the adapters in use by vLLM's steps."""
        requests = (each.lora_request for each in self._core.scheduler.running)
        running = {each.lora_name for each in requests if each is not None}
        used = {each.message.adapter for each in self._sequences.values()}
        return AdapterLoad(sorted(running), sorted(running), sorted(used - running - {""}))

    def shutdown(self) -> None:
        """Stop the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
