"""POST /admin/weights: replace the weights of all engines while they serve, or of none."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter

from engine.shared.messages import PUSHED, FleetRequest, UtilityResult, UtilityValue, WeightsSource
from server.api.admin.schema import WeightsRequest, WeightsStatus
from server.api.openapi import errors
from server.api.route import OperatorRoute
from server.api.services import ServicesDep
from server.errors import ApiError, invalid_field, unavailable
from server.router.generation_client import GenerationClient, NoEngineAvailable

router = APIRouter(route_class=OperatorRoute)

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = 1800.0
"""Timeout in seconds for an engine to load weights, possibly over a network."""

HAND_OVER_SECONDS = 10.0
"""Seconds that running requests get to leave an engine before its weights are replaced."""

_POLL_INTERVAL = 0.05


@router.post("/admin/weights", responses=errors(409))
async def update_weights(body: WeightsRequest, services: ServicesDep) -> WeightsStatus:
    """Load new weights in all engines; if one fails, all keep their current ones."""
    started_at = time.monotonic()
    named = body.model if body.revision is None else f"{body.model}@{body.revision}"
    source = WeightsSource(body.model, body.revision, body.weight_version or named)
    if not source.version.isascii() or not source.version.isprintable():
        raise invalid_field(
            "weight_version", "is required, because the model's name cannot be sent in a header"
        )
    ranks = await Update(services.client, source, "model").run(rolling=body.mode == "rolling")
    seconds = round(time.monotonic() - started_at, 3)
    return WeightsStatus(source.version, ranks, seconds)


class Update:
    """One weight update, with rollback."""

    def __init__(self, client: GenerationClient, source: WeightsSource, field: str) -> None:
        """Prepare an update to the weights that the request's `field` names."""
        self._client = client
        self._source = source
        self._field = field
        self._before: dict[int, WeightsSource] = {}
        """Previous weights of each updated engine, by rank."""
        self._updates: dict[int, int] = {}
        """Update counter of each engine before this update, by rank."""

    async def run(self, *, rolling: bool) -> list[int]:
        """Update all running engines and ones that start later; return the ranks updated.

        Engines that start later wait if the weights came from a trainer.

        Raises:
            ApiError: an engine could not be updated; updated engines were rolled back.
            NoEngineAvailable: no engine is registered.
        """
        self._client.check_accepts_requests()
        infos = await self._client.call_utility(None, "info", {})
        for info, state in zip(infos, results_of(infos, self._field), strict=True):
            self._updates[info.rank] = int(state["weight_updates"] or 0)
        ranks = sorted(self._updates)
        try:
            if rolling:
                for rank in ranks:
                    await self._replace_in(rank, only=len(ranks) == 1)
            else:
                loads = [self._load(rank, self._source) for rank in ranks]
                self._take([each for loaded in await asyncio.gather(*loads) for each in loaded])
            request = FleetRequest(secrets.randbits(60), "weights", weights=self._source)
            await self._client.order_fleet(request)
        except (ApiError, NoEngineAvailable, asyncio.CancelledError) as error:
            logger.warning("reverting weights %s: %s", self._source.version, error)
            # The client may have disconnected: the engines must stay consistent regardless.
            await asyncio.shield(self._take_back())
            raise
        if any(source.model == PUSHED for source in (self._source, *self._before.values())):
            await self._client.call_utility(None, "settle_weights", {})
        logger.info("engines %s use weights %s", ranks, self._source.version)
        return ranks

    async def _replace_in(self, rank: int, *, only: bool) -> None:
        """Replace the weights of one engine; unless it is the `only` one, its requests move."""
        info = await self._call(rank, "info")
        halts = not only and not info["is_paused"] and not info["is_sleeping"]
        if halts:
            await self._call(rank, "pause", mode="move")
        try:
            until = time.monotonic() + HAND_OVER_SECONDS
            while halts and time.monotonic() < until:
                info = await self._call(rank, "info")
                if not info["running"] and not info["waiting"]:
                    break
                await asyncio.sleep(_POLL_INTERVAL)
            self._take(await self._load(rank, self._source))
        finally:
            if halts:
                await asyncio.shield(self._client.call_utility(rank, "resume", {}))

    async def _call(
        self, rank: int, name: str, **arguments: UtilityValue
    ) -> dict[str, UtilityValue]:
        answers = await self._client.call_utility(rank, name, arguments)
        [result] = results_of(answers, self._field)
        return result

    async def _load(self, rank: int, source: WeightsSource) -> list[UtilityResult]:
        arguments: dict[str, UtilityValue] = {
            "model": source.model, "revision": source.revision, "version": source.version,
            "after": self._updates[rank] + (rank in self._before),
        }  # fmt: skip
        return await self._client.call_utility(rank, "load_weights", arguments, LOAD_TIMEOUT)

    def _take(self, answers: Sequence[UtilityResult]) -> None:
        for answer in answers:
            if answer.error is None and isinstance(answer.result, dict):
                model, revision, version = (
                    answer.result[name] for name in ("model", "revision", "version")
                )
                self._before[answer.rank] = WeightsSource(
                    str(model), None if revision is None else str(revision), str(version)
                )
        results_of(answers, self._field)

    async def _take_back(self) -> None:
        for rank, source in self._before.items():
            try:
                results_of(await self._load(rank, source), self._field)
            except (ApiError, NoEngineAvailable) as error:
                # If it died, its successor starts with the previously ordered weights.
                logger.error("cannot restore the weights of engine %d: %s", rank, error)


def results_of(answers: Sequence[UtilityResult], field: str) -> list[dict[str, UtilityValue]]:
    """Return the results of a utility call; errors name `field` of the request.

    Raises:
        ApiError: 400 if an engine failed, 409 if another update came first, 503 if an engine died.
    """
    results = []
    for answer in answers:
        if isinstance(answer.result, dict) and answer.error is None:
            results.append(answer.result)
            continue
        if "replaced meanwhile" in (answer.error or ""):
            raise ApiError(409, f"Engine {answer.rank}: {answer.error}.", code="weights_busy")
        if "died before" in (answer.error or ""):
            raise unavailable(f"Engine {answer.rank}: {answer.error}.")
        raise invalid_field(field, f"engine {answer.rank}: {answer.error}", code="bad_weights")
    return results
