"""GET / and its files: the status page; GET /status.json: what it shows."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from engine.shared.messages import EngineEntry, EngineStats
from engine.shared.version import SWELL_VERSION
from server.api.context import Context
from server.api.openapi import json_responses
from server.api.status.schema import (
    EngineCounts,
    EngineOverview,
    FirstTokenTimes,
    MissingOverview,
    StatusResponse,
)
from server.observe.shared_work import SharedWork

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
}
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_TIMES_KEPT_SECONDS = 0.5


class _FirstTokenTimes:
    """Sums over the node's processes, read again only when they are old: reading takes a while."""

    def __init__(self, context: Context) -> None:
        self._reading = SharedWork(lambda: context.metrics.first_token_times)
        self._read_at = float("-inf")
        self._times = FirstTokenTimes(0.0, 0)

    async def current(self) -> FirstTokenTimes:
        if time.monotonic() - self._read_at >= _TIMES_KEPT_SECONDS:
            self._times = FirstTokenTimes(*await self._reading.result())
            self._read_at = time.monotonic()
        return self._times


def _counts(stats: EngineStats | None) -> EngineCounts | None:
    if stats is None:
        return None
    return EngineCounts(
        step=stats.step,
        waiting=stats.waiting,
        running=stats.running,
        kv_usage=stats.kv_usage,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        prompt_tokens_total=stats.counters.prompt_tokens,
        generation_tokens_total=stats.counters.generation_tokens,
        prefix_cache_queries_total=stats.counters.prefix_cache_queries,
        prefix_cache_hits_total=stats.counters.prefix_cache_hits,
        preemptions_total=stats.counters.preemptions,
        dummy_steps_total=stats.counters.dummy_steps,
    )


def _engine(entry: EngineEntry, stats_age: float | None) -> EngineOverview:
    setup = entry.setup
    return EngineOverview(
        rank=entry.rank,
        incarnation=entry.incarnation,
        host=entry.host,
        ready=entry.ready,
        restarts=entry.restarts,
        num_kv_blocks=setup.num_kv_blocks if setup else None,
        block_size=setup.block_size if setup else None,
        max_model_len=setup.max_model_len if setup else None,
        stats_age=stats_age,
        counts=_counts(entry.stats),
        halted=entry.stats.halted if entry.stats else False,
        draining=entry.draining,
        batch_invariant=setup.is_batch_invariant if setup else None,
    )


class StatusRoutes:
    """The status page and its data."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first_token_times = _FirstTokenTimes(context)

    async def status(self) -> Response:
        """Show engines, wave and front ends as the front end that answers sees them."""
        body = msgspec.json.encode(self._status(await self._first_token_times.current()))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    def _status(self, first_token_times: FirstTokenTimes) -> StatusResponse:
        context = self._context
        view, ages = context.client.view, context.client.stats_age
        return StatusResponse(
            version=SWELL_VERSION,
            models=list(context.names),
            has_chat_template=context.model.tokenizer.chat_template is not None,
            time=time.time(),
            started=context.created,
            ready=context.client.ready,
            wave=view.wave if view else 0,
            running=view.running if view else False,
            num_front_ends=view.num_front_ends if view else 0,
            wakeups_total=dict(view.wakeups_total) if view else {},
            first_token_times=first_token_times,
            engines=[
                _engine(entry, ages.get(entry.rank))
                for entry in sorted(view.engines if view else [], key=lambda entry: entry.rank)
            ],
            num_expected=view.expected if view else 0,
            missing=[
                MissingOverview(each.rank, each.reason, each.age)
                for each in (view.missing if view else [])
            ],
        )


def status_routes(context: Context) -> list[BaseRoute]:
    """Return the routes of the page, its files and its data."""
    data = APIRoute(
        "/status.json",
        StatusRoutes(context).status,
        methods=["GET"],
        responses=json_responses(StatusResponse, 401, 404),
        response_class=Response,
        response_model=None,
    )
    folder = Path(__file__).parents[2] / "status_page"
    page = [
        Route(path, _static((folder / name).read_bytes(), media_type))
        for path, (name, media_type) in _FILES.items()
    ]
    return [data, *page]


def _static(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=_PAGE_HEADERS)

    return serve
