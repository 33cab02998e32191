"""GET and POST /admin/*: for people who run the server, behind the admin key."""

import msgspec
from fastapi import Response

from engine.shared.messages import EngineEntry, UtilityResult
from server.api.admin.schema import (
    EngineList,
    EngineStatus,
    UtilityAnswer,
    UtilityAnswers,
    UtilityRequest,
)
from server.api.body import read_body
from server.api.context import Context
from server.http.call import Call
from server.http.errors import invalid


class AdminRoutes:
    """Endpoints without a body."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def list_engines(self) -> Response:
        """List the engines with their state and load."""
        client = self._context.client
        view = client.view
        if view is None:
            return _json(EngineList([], 0, False, 0))
        ages = client.stats_age
        engines = [_status(entry, ages.get(entry.rank)) for entry in view.engines]
        engines.sort(key=lambda engine: engine.rank)
        return _json(EngineList(engines, view.wave, view.running, view.num_front_ends))

    async def reset_prefix_cache(self, rank: int | None = None) -> Response:
        """Make one engine, or all, forget the prompts that they have computed."""
        results = await self._context.client.call_utility(rank, "reset_prefix_cache", {})
        return _json(_answers(results))


async def call_utility(call: Call, context: Context) -> None:
    """Call a utility of one engine, or of all, by its name."""
    request = read_body(UtilityRequest, call.body)
    results = await context.client.call_utility(request.rank, request.name, request.arguments)
    await call.send_struct(_answers(results))


def _answers(results: list[UtilityResult]) -> UtilityAnswers:
    """Return what the engines answered.

    Raises:
        ApiError: 400, no engine could do it.
    """
    if results and all(result.error is not None for result in results):
        raise invalid(f"No engine could do it: {results[0].error}", code="utility_failed")
    answers = [UtilityAnswer(each.rank, each.result, each.error) for each in results]
    return UtilityAnswers(sorted(answers, key=lambda answer: answer.rank))


def _status(entry: EngineEntry, stats_age: float | None) -> EngineStatus:
    stats, setup = entry.stats, entry.setup
    return EngineStatus(
        rank=entry.rank,
        incarnation=entry.incarnation,
        ready=entry.ready,
        host=entry.host,
        restarts=entry.restarts,
        running=stats.running if stats else 0,
        waiting=stats.waiting if stats else 0,
        kv_usage=stats.kv_usage if stats else 0.0,
        queued_prefill_tokens=stats.queued_prefill_tokens if stats else 0,
        stats_age=stats_age,
        num_kv_blocks=setup.num_kv_blocks if setup else None,
        max_num_seqs=setup.max_num_seqs if setup else None,
        halted=stats.halted if stats else False,
    )


def _json(payload: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")
