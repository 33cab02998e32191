"""An engine with a real model in the test process that offers or pulls KV blocks."""

from pathlib import Path
from threading import Event
from typing import Any, Literal

import msgspec
import zmq

from engine.core.engine_core import EngineCore
from engine.core.events import PrerequisitesSettled
from engine.executor.in_process import InProcessExecutor
from engine.executor.team import Team
from engine.kv.tier_opening import check_tiers, open_tiers
from engine.kv.transfer_port import open_port
from engine.shared.config import (
    ClusterConfig,
    LoraConfig,
)
from engine.shared.messages import (
    AdapterEntry,
    AdapterTable,
    AddRequest,
    EngineCounters,
    KvSource,
    RequestOutput,
)
from engine.shared.transport import make_context
from tests.engine.configs import config_of
from tests.support.waiting import PATIENCE


class PlayedEngine:
    """Runs requests; must be closed.

    Args:
        shards: number of processes over which the model is sharded.
        sockets: directory of the sockets; None: no sockets and no role.
    """

    def __init__(
        self,
        model: Path,
        sockets: Path | None,
        *,
        incarnation: int,
        role: Literal["prefill", "decode", "both"] = "both",
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        num_blocks: int = 200,
        shards: int = 1,
        cluster: ClusterConfig | None = None,
        tiers: dict[str, Any] | None = None,
        lora: LoraConfig | None = None,
        **scheduling: Any,
    ) -> None:
        config = config_of(
            model,
            model={"max_model_len": 256},
            cache={
                "num_kv_blocks": num_blocks,
                "kv_cache_dtype": kv_cache_dtype,
                "kv_role": None if sockets is None else role,
                **(tiers or {}),
            },
            scheduler={"max_num_batched_tokens": 48, "speculative_row_price": 0.0} | scheduling,
            executor={"batch_invariant": shards == 1},
            parallel={"tensor_parallel_size": shards},
        )
        self.config = msgspec.structs.replace(
            config,
            lora=lora or LoraConfig(),
            cluster=cluster or ClusterConfig(coordinator=f"ipc://{sockets}/coordinator"),
        )
        check_tiers(self.config, pools=False)
        self._executor = (
            InProcessExecutor(self.config)
            if shards == 1
            else InProcessExecutor(self.config, team=Team(self.config, 0, 1))
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        counters = EngineCounters()
        opened = open_port(
            self.config,
            self._executor,
            self._context,
            rank=0,
            incarnation=incarnation,
            counters=counters,
        )
        self.port = None if opened is None else opened[0]
        self._tiers = open_tiers(
            self.config,
            self._executor,
            self._executor.info.model_fingerprint,
            peers=self.port,
            counters=counters,
        )
        self._settled = Event()
        if self._tiers is not None:
            self._tiers.on_settled = self._settled.set
        self.source = KvSource("" if opened is None else opened[2], incarnation)
        self.core = EngineCore(
            self.config, self._executor, rank=0, incarnation=incarnation, tiers=self._tiers
        )
        self.core.front_end_joined(0, 1)

    @property
    def counters(self) -> EngineCounters:
        return self.core.stats().counters

    def load_adapters(self, names: list[str]) -> list[str]:
        """Load adapters of the directory; return their versions."""
        entries = [AdapterEntry(serial, name, name) for serial, name in enumerate(names, 1)]
        self.core.adapters.take(AdapterTable(1, entries))
        assert self.core.adapters.wait() == []
        return [self.core.adapters.versions()[name] for name in names]

    def answer(self, request: AddRequest, **fields: Any) -> list[int]:
        """Return the tokens of a request's answer."""
        outputs = self.outputs(request, **fields)
        assert outputs[-1].finish_reason == "length", outputs[-1]
        return [token for output in outputs for token in output.token_ids]

    def outputs(self, request: AddRequest, **fields: Any) -> list[RequestOutput]:
        """Run a request to its end."""
        return self.outputs_of_all([msgspec.structs.replace(request, **fields)])

    def outputs_of_all(self, requests: list[AddRequest]) -> list[RequestOutput]:
        """Run requests to their ends, all at once."""
        for each in requests:
            self.core.handle(each)
        outputs: list[RequestOutput] = []
        while self.core.has_requests:
            if self._settled.is_set() or not self.core.has_work:
                assert self._settled.wait(PATIENCE)
                self._settled.clear()
                self.core.handle(PrerequisitesSettled())
                continue
            outputs += self.core.step().outputs.get(0, [])
        self.core._scheduler.check_integrity()
        return outputs

    def prefill(self, request: AddRequest) -> KvSource:
        """Compute a prompt, and offer its blocks."""
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
        self.outputs(request, sampling=sampling, offers_blocks=True)
        return self.source

    def close(self) -> None:
        """Shut down like a process; idempotent."""
        if self._tiers is not None:
            self._tiers.shutdown()
        self._executor.shutdown()
        self._context.destroy(linger=0)
