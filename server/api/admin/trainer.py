"""Weights from a trainer, under vLLM's names: it joins the engines, then broadcasts tensors.

What state there is the engines have, so that any API server may be asked. Whatever fails ends the
group with the trainer in all engines, which keep the weights that they had.
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

_LOOK_INTERVAL = 0.02
"""Seconds between two looks at whether all have met, or have received everything."""
_MARGIN = 10.0


@router.get("/get_world_size")
async def get_world_size(services: ServicesDep, include_dp: bool = True) -> schema.WorldSize:
    """Say how many processes join a trainer: one of each engine."""
    infos = await services.client.call_utility(None, "info", {})
    return schema.WorldSize(len(infos) if include_dp else 1)


@router.post("/init_weight_transfer_engine", responses=errors(409))
async def init_weight_transfer_engine(
    body: schema.InitTransferRequest, services: ServicesDep
) -> schema.Done:
    """Have all engines meet a trainer, which is rank 0; answers when they have."""
    await _Transfer(services.client, "init_info").join(body.init_info)
    return schema.Done("Weight transfer initialized")


@router.post("/start_weight_update", responses=errors(409))
async def start_weight_update(services: ServicesDep) -> schema.Done:
    """Begin an update that comes in several parts."""
    await _Transfer(services.client, None).call("start_weight_update")
    return schema.Done("Weight update started")


@router.post("/update_weights", responses=errors(409))
async def update_weights(body: schema.UpdateWeightsRequest, services: ServicesDep) -> schema.Done:
    """Receive weights, and compute with them unless more parts are to come."""
    transfer = _Transfer(services.client, "update_info")
    if not await transfer.receive(body.update_info):
        await transfer.finish(body.weight_version)
    return schema.Done("Weights updated")


@router.post("/finish_weight_update", responses=errors(409))
async def finish_weight_update(
    body: schema.FinishUpdateRequest, services: ServicesDep
) -> schema.Done:
    """Compute with all parts that were received."""
    await _Transfer(services.client, None).finish(body.weight_version)
    return schema.Done("Weight update finished")


class _Transfer:
    """What one request has all engines do."""

    def __init__(self, client: GenerationClient, field: str | None) -> None:
        """Prepare for a request whose field says what is wanted, if it has one."""
        self._client = client
        self._field = field or "weight_version"

    async def join(self, info: schema.InitInfo) -> None:
        """Have all engines meet the trainer."""
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
                        "rank": info.rank_offset + place, "world_size": info.world_size,
                        "timeout": info.timeout,
                    },
                )
                for place, rank in enumerate(ranks)
            ]  # fmt: skip
            for answers in await asyncio.gather(*calls):
                results_of(answers, self._field)
            # Torch waits for the store, then for the others.
            await self._until_joined(2 * info.timeout + _MARGIN)

    async def receive(self, info: schema.UpdateInfo) -> bool:
        """Have all engines receive tensors; return whether more are to come."""
        async with self._leaving_if_it_fails():
            if info.packed:
                raise invalid_field("update_info", "packed must be false.")
            said = await self.call(
                "update_weights",
                {
                    "names": msgspec.json.encode(info.names).decode(),
                    "dtype_names": msgspec.json.encode(info.dtype_names).decode(),
                    "shapes": msgspec.json.encode(info.shapes).decode(),
                },
            )
            if len({each["is_open"] for each in said}) > 1:
                raise _conflict("not all engines have begun this update")
            await self._until_joined(LOAD_TIMEOUT)
        return bool(said[0]["is_open"])

    async def finish(self, version: str | None) -> None:
        """Have all engines compute with what they have received.

        Raises:
            ApiError: not all could, and none does.
            NoEngineAvailable: there is none.
        """
        async with self._leaving_if_it_fails():
            infos = await self.call("info")
            updates = max(int(each["weight_updates"] or 0) for each in infos)
            source = WeightsSource(PUSHED, None, version or f"update-{updates + 1}")
            await Update(self._client, source, self._field).run(rolling=False)

    async def call(
        self, name: str, arguments: dict[str, UtilityValue] | None = None
    ) -> list[dict[str, UtilityValue]]:
        """Return what all engines answer."""
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
            for answer, said in zip(answers, results_of(answers, self._field), strict=True):
                phases.add(said["phase"])
                if said["phase"] == "none":
                    why = said["error"] or "it has started since"
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
            await asyncio.sleep(_LOOK_INTERVAL)

    @contextlib.asynccontextmanager
    async def _leaving_if_it_fails(self) -> AsyncIterator[None]:
        try:
            yield
        except (ApiError, NoEngineAvailable, asyncio.CancelledError) as error:
            logger.warning("leaving the trainer: %s", error)
            # The trainer may have disconnected: no engine may go on waiting for it.
            await asyncio.shield(self._leave())
            raise

    async def _leave(self) -> None:
        with contextlib.suppress(NoEngineAvailable):
            await self._client.call_utility(None, "leave_weight_transfer", {})


def _conflict(reason: str) -> ApiError:
    return ApiError(409, f"{reason}: call /init_weight_transfer_engine again.", code="no_trainer")
