"""Adapters in the processes of vLLM's executor."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from engine.lora.adapter_config import BadAdapter
from engine.lora.files import AdapterFiles
from engine.lora.store import AdapterStore
from engine.shared.messages import AdapterLoad
from engine.vllm.outputs import Sequence

logger = logging.getLogger(__name__)

_MAX_SIZE = 4 << 30
"""Maximum bytes of an adapter's weights."""


def adapter_paths(max_rank: int) -> AdapterStore[str]:
    """Return a store that checks the files of adapters, and keeps their directories."""

    def directory(files: AdapterFiles) -> str:
        rank = max([files.config.r, *files.config.rank_pattern.values()])
        if rank > max_rank:
            raise BadAdapter(f"its rank is {rank}: above --max-lora-rank {max_rank}")
        return str(files.directory)

    return AdapterStore(_MAX_SIZE, directory)


class VllmAdapters(Mapping[str, LoRARequest]):
    """The adapters that requests can use, by version.

    vLLM reads checked files again, in the engine's thread between two steps, so that an adapter
    that it cannot load fails no step.

    Args:
        core: vLLM's `EngineCore`.
        paths: directories of the checked adapters, by version.
        sequences: the engine's requests.
    """

    def __init__(
        self, core: Any, paths: Mapping[str, str], sequences: Mapping[int, Sequence]
    ) -> None:
        self._core, self._paths, self._sequences = core, paths, sequences
        self._requests: dict[str, LoRARequest] = {}
        self._last_id = 0

    def __getitem__(self, version: str) -> LoRARequest:
        return self._requests[version]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

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
