"""Weight transfer from a trainer, under vLLM's names: it joins engines and broadcasts tensors.

All state is in the engines, so any API server can handle any request. A failure dissolves the group
with the trainer in all engines, which keep their previous weights.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter

from engine.shared.messages import PUSHED, UtilityValue, WeightsSource
from server.api.admin import schema
from server.api.admin.weights import LOAD_TIMEOUT, Update, results_of
from server.api.openapi import errors
from server.api.route import OperatorRoute
from server.api.services import ServicesDep
from server.errors import ApiError, invalid_field
from server.router.generation_client import GenerationClient, NoEngineAvailable

logger = logging.getLogger(__name__)

router = APIRouter(route_class=OperatorRoute)

_POLL_INTERVAL = 0.02
"""Seconds between polls for all engines having joined or received everything."""
_MARGIN = 10.0


@router.get("/get_world_size")
async def get_world_size(services: ServicesDep, include_dp: bool = True) -> schema.WorldSize:
    """Return the number of processes that join a trainer: one per engine."""
    infos = await services.client.call_utility(None, "info", {})
    return schema.WorldSize(len(infos) if include_dp else 1)


@router.post("/init_weight_transfer_engine", responses=errors(409))
async def init_weight_transfer_engine(
    body: schema.InitTransferRequest, services: ServicesDep
) -> schema.Done:
    """Join all engines to a trainer, which is rank 0; return once all have joined."""
    await _Transfer(services.client, "init_info").join(body.init_info)
    return schema.Done("Weight transfer initialized")


@router.post("/start_weight_update", responses=errors(409))
async def start_weight_update(services: ServicesDep) -> schema.Done:
    """Start an update that is sent in several parts."""
    await _Transfer(services.client, None).call("start_weight_update")
    return schema.Done("Weight update started")


@router.post("/update_weights", responses=errors(409))
async def update_weights(body: schema.UpdateWeightsRequest, services: ServicesDep) -> schema.Done:
    """Receive weights, and switch to them unless more parts follow."""
    transfer = _Transfer(services.client, "update_info")
    if not await transfer.receive(body.update_info):
        await transfer.finish(body.weight_version)
    return schema.Done("Weights updated")


@router.post("/finish_weight_update", responses=errors(409))
async def finish_weight_update(
    body: schema.FinishUpdateRequest, services: ServicesDep
) -> schema.Done:
    """Switch to the weights received in all parts."""
    await _Transfer(services.client, None).finish(body.weight_version)
    return schema.Done("Weight update finished")


class _Transfer:
    """The engine calls of one request."""

    def __init__(self, client: GenerationClient, field: str | None) -> None:
        """Prepare calls on behalf of a request; errors name `field`, if given."""
        self._client = client
        self._field = field or "weight_version"

    async def join(self, info: schema.InitInfo) -> None:
        """Join all engines to the trainer."""
        infos = await self._client.call_utility(None, "info", {})
        ranks = sorted(each.rank for each in infos)
        if info.rank_offset + len(ranks) > info.world_size:
            raise invalid_field(
                "init_info",
                f"a world of {info.world_size} has no room for {len(ranks)} engines "
                f"from rank {info.rank_offset} on.",
            )
        async with self._leaving_if_it_fails():
            calls = [
                self._client.call_utility(
                    rank,
                    "init_weight_transfer_engine",
                    {
                        "master_address": info.master_address, "master_port": info.master_port,
                        "rank": info.rank_offset + index, "world_size": info.world_size,
                        "timeout": info.timeout,
                    },
                )
                for index, rank in enumerate(ranks)
            ]  # fmt: skip
            for answers in await asyncio.gather(*calls):
                results_of(answers, self._field)
            # Torch waits for the store, then for the other ranks.
            await self._until_joined(2 * info.timeout + _MARGIN)

    async def receive(self, info: schema.UpdateInfo) -> bool:
        """Receive tensors in all engines; return whether more parts follow."""
        async with self._leaving_if_it_fails():
            if info.packed:
                raise invalid_field("update_info", "packed must be false.")
            states = await self.call(
                "update_weights",
                {
                    "names": msgspec.json.encode(info.names).decode(),
                    "dtype_names": msgspec.json.encode(info.dtype_names).decode(),
                    "shapes": msgspec.json.encode(info.shapes).decode(),
                },
            )
            if len({each["is_open"] for each in states}) > 1:
                raise _conflict("not all engines have begun this update")
            await self._until_joined(LOAD_TIMEOUT)
        return bool(states[0]["is_open"])

    async def finish(self, version: str | None) -> None:
        """Switch all engines to the weights that they have received; if one fails, none."""
        async with self._leaving_if_it_fails():
            infos = await self.call("info")
            updates = max(int(each["weight_updates"] or 0) for each in infos)
            source = WeightsSource(PUSHED, None, version or f"update-{updates + 1}")
            await Update(self._client, source, self._field).run(rolling=False)

    async def call(
        self, name: str, arguments: dict[str, UtilityValue] | None = None
    ) -> list[dict[str, UtilityValue]]:
        """Call a utility in all engines and return the results."""
        answers = await self._client.call_utility(None, name, arguments or {})
        for answer in answers:
            if "has not joined" in (answer.error or ""):
                raise _conflict(f"engine {answer.rank}: {answer.error}")
        return results_of(answers, self._field)

    async def _until_joined(self, within: float) -> None:
        until = time.monotonic() + within
        while True:
            answers = await self._client.call_utility(None, "weight_transfer", {})
            phases = set()
            for answer, state in zip(answers, results_of(answers, self._field), strict=True):
                phases.add(state["phase"])
                if state["phase"] == "none":
                    why = state["error"] or "it has started since"
                    raise invalid_field(
                        self._field,
                        f"engine {answer.rank} lost the trainer: {why}.",
                        code="trainer_lost",
                    )
            if phases == {"joined"}:
                return
            if time.monotonic() > until:
                raise invalid_field(
                    self._field, f"not done within {within:g} s.", code="trainer_lost"
                )
            await asyncio.sleep(_POLL_INTERVAL)

    @contextlib.asynccontextmanager
    async def _leaving_if_it_fails(self) -> AsyncIterator[None]:
        try:
            yield
        except (ApiError, NoEngineAvailable, asyncio.CancelledError) as error:
            logger.warning("leaving the trainer: %s", error)
            # The client may have disconnected: no engine must keep waiting for the trainer.
            await asyncio.shield(self._leave())
            raise

    async def _leave(self) -> None:
        with contextlib.suppress(NoEngineAvailable):
            await self._client.call_utility(None, "leave_weight_transfer", {})


def _conflict(reason: str) -> ApiError:
    return ApiError(409, f"{reason}: call /init_weight_transfer_engine again.", code="no_trainer")
