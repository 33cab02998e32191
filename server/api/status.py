"""GET / and its files: the status page; GET /status.json: what it shows."""

import time
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response

from engine.shared.messages import AbsenceReason, EngineEntry
from engine.shared.pooling import Task, TokenTask
from engine.shared.version import SWELL_VERSION
from server.api.openapi import errors, json_responses
from server.api.route import ApiRoute
from server.api.services import ServicesDep


class EngineCounts(msgspec.Struct):
    """Last report of an engine; names ending in `_total` count from the start of its process."""

    step: int
    waiting: int
    running: int
    kv_usage: float
    """Fraction of KV blocks in use, 0 to 1."""
    queued_prefill_tokens: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    preemptions_total: int
    dummy_steps_total: int


class EngineOverview(msgspec.Struct):
    """State of one engine."""

    rank: int
    incarnation: int
    """Random number of its process: counters of different incarnations are not comparable."""
    host: str
    ready: bool
    restarts: int
    num_kv_blocks: int | None
    block_size: int | None
    max_model_len: int | None
    stats_age: float | None
    """Age of the newest stats in seconds."""
    counts: EngineCounts | None
    halted: bool = False
    """Paused or asleep by an operator's order."""
    draining: bool = False
    """Whether it finishes its requests and then exits."""
    batch_invariant: bool | None = None
    """Whether its tokens are independent of the composition of the batch."""


class MissingOverview(msgspec.Struct):
    """An expected engine that is missing."""

    rank: int
    reason: AbsenceReason
    """not_joined: it never registered; died: it or its supervisor reported its end; silent: it
    timed out; drained: it left by order; refused: its weights differ from those of the other
    engines."""
    age: float
    """Seconds since it went missing."""


class FirstTokenTimes(msgspec.Struct):
    """Sum and count of times to first token of this node's streams since it started, in seconds."""

    sum: float
    count: int


class StatusResponse(msgspec.Struct):
    """The cluster as seen by one front end: engines, wave, front ends."""

    version: str
    models: list[str]
    has_chat_template: bool
    """Whether chat completions are available."""
    takes_images: bool
    """Whether they accept images."""
    pooling_task: Task | TokenTask | None
    """Task of a pooling model; None if the model generates text."""
    time: float
    """Unix time of this response."""
    started: int
    """Unix time at which this front end started to serve."""
    ready: bool
    """Whether at least one engine is ready."""
    wave: int
    running: bool
    """Whether the engines are stepping; false while all are paused."""
    num_front_ends: int
    wakeups_total: dict[str, int]
    """Number of wake-ups of paused engines, by source."""
    first_token_times: FirstTokenTimes
    engines: list[EngineOverview]
    num_expected: int = 0
    """Target number of engines."""
    missing: list[MissingOverview] = []


_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/access.js": ("access.js", "text/javascript; charset=utf-8"),
    "/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/markdown-it.min.js": ("markdown-it.min.js", "text/javascript; charset=utf-8"),
}
_FOLDER = Path(__file__).parents[1] / "status_page"
_CONTENTS = {path: ((_FOLDER / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(route_class=ApiRoute)


def _engine(entry: EngineEntry, stats_age: float | None) -> EngineOverview:
    setup, stats, counts = entry.setup, entry.stats, None
    if stats is not None:
        counts = EngineCounts(
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
        counts=counts,
        halted=stats.halted if stats else False,
        draining=entry.draining,
        batch_invariant=setup.is_batch_invariant if setup else None,
    )


@router.get("/status.json", responses=json_responses(StatusResponse) | errors(401, 404))
async def status(services: ServicesDep) -> Response:
    """Show engines, wave and front ends as seen by this front end."""
    view, ages = services.client.view, services.client.stats_age
    pooling = services.model.pooling
    shown = StatusResponse(
        version=SWELL_VERSION,
        models=list(services.names),
        has_chat_template=services.model.tokenizer.chat_template is not None,
        takes_images=services.model.images is not None and services.client.serves_images,
        pooling_task=pooling.spec.task if pooling else None,
        time=time.time(),
        started=services.created,
        ready=services.client.ready,
        wave=view.wave if view else 0,
        running=view.running if view else False,
        num_front_ends=view.num_front_ends if view else 0,
        wakeups_total=dict(view.wakeups_total) if view else {},
        first_token_times=FirstTokenTimes(*await services.first_token_times.result()),
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
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(shown), media_type="application/json", headers=headers)


async def _file(request: Request) -> Response:
    body, media_type = _CONTENTS[request.scope["path"]]
    return Response(body, media_type=media_type, headers=_PAGE_HEADERS)


for _path in _CONTENTS:
    router.add_route(_path, _file, include_in_schema=False)
