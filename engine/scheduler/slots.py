"""Which requests hold a slot and KV blocks: until no plan in flight uses them any more."""

from collections.abc import Collection

from engine.batch.grammars import Grammars
from engine.scheduler.adapter_slots import NO_ADAPTER, AdapterSlots
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.request import NO_SLOT, Request, RequestStatus


class Slots:
    """Hands out the executor's slots, and takes them back together with their blocks."""

    def __init__(
        self,
        num_slots: int,
        kv: KVCacheManager,
        grammars: Grammars | None,
        adapters: AdapterSlots,
    ) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._kv = kv
        self._grammars = grammars
        self._adapters = adapters
        self.num_leaving_blocks = 0
        """Blocks of requests that left but still have rows in flight: free when these end."""

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    def take(self, request: Request) -> None:
        """Give a request a slot; one has to be free, and its adapter admitted."""
        request.slot = self._free.pop()
        request.adapter_slot = self._adapters.take(request.adapter)
        if request.grammar is not None and self._grammars is not None:
            self._grammars.assign(request.slot, request.grammar)

    def discard_fetch(self, request: Request) -> None:
        """A request will not use what is read, or was, for it."""
        if request.fetch is not None:
            self._kv.discard(request.fetch)
            request.fetch = None

    def vacate(self, request: Request) -> None:
        """Release slot and blocks of a request that runs no longer, at once or when it is idle."""
        self.num_leaving_blocks += request.table.num_blocks
        self.release_when_idle(request)

    def release_when_idle(self, request: Request) -> None:
        """Release slot and blocks of a vacated request unless a plan in flight uses them."""
        if request.num_steps_in_flight or request.slot == NO_SLOT:
            return
        self.num_leaving_blocks -= request.table.num_blocks
        self._kv.free(request.table)
        if request.grammar is not None and self._grammars is not None:
            self._grammars.release(request.slot)
        self._free.append(request.slot)
        request.slot = NO_SLOT
        self._adapters.release(request.adapter)
        request.adapter_slot = NO_ADAPTER

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Check that slots and blocks agree with all requests that are known.

        Raises:
            AssertionError: something is leaked, shared wrongly or counted wrongly.
        """
        self._kv.check_integrity([r.table for r in requests])
        holders = [r for r in requests if r.slot != NO_SLOT]
        assert all(r.slot != NO_SLOT or not r.table.num_blocks for r in requests)
        slots = sorted([r.slot for r in holders] + self._free)
        assert slots == list(range(len(slots))), "slots are leaked or shared"
        self._adapters.check_integrity([r.adapter for r in holders])
        leaving = [r for r in holders if r.status is not RequestStatus.RUNNING]
        assert self.num_leaving_blocks == sum(r.table.num_blocks for r in leaving)
        assert all(r.num_steps_in_flight > 0 for r in leaving)
