"""Stored responses: continuing, retrieving, deleting and cancelling them."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fastapi import FastAPI, Request

from server.api.responses.stored import _owner, retrieve
from server.config import FrontEndConfig, GuardConfig, HttpConfig
from server.errors import ApiError
from server.limits import MAX_JOBS_OF_ONE
from server.store.records import BackendFailed, DiskFull, Record
from server.store.service import ResponseStore
from server.store.sql import SqlBackend
from tests.server.conftest import app_of, prompt_of, tiny
from tests.support.stores import sqlite_backend
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def config(request: pytest.FixtureRequest) -> FrontEndConfig:
    chosen = getattr(request, "param", None)
    return tiny(
        guards=chosen if isinstance(chosen, GuardConfig) else GuardConfig(),
        http=chosen if isinstance(chosen, HttpConfig) else HttpConfig(),
    )


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[[], ResponseStore]]:
    made: list[ResponseStore] = []

    def make() -> ResponseStore:
        backend = sqlite_backend(tmp_path / "responses.sqlite", 1 << 24, 3600.0)
        made.append(ResponseStore(backend))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def new_app(
    config: FrontEndConfig, engines: Any, tokenizer: Any, new_store: Callable[[], ResponseStore]
) -> Callable[[], FastAPI]:
    engines.context = 4096
    return lambda: app_of(config, engines, tokenizer, store=new_store())


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


@pytest.fixture
def client(served: Any, new_app: Callable[[], FastAPI]) -> Iterator[openai.OpenAI]:
    with served(new_app()) as url, client_of(url) as made:
        yield made


@pytest.fixture
def other(served: Any, new_app: Callable[[], FastAPI]) -> Iterator[openai.OpenAI]:
    """A client of a different front end on the same node."""
    with served(new_app()) as url, client_of(url) as made:
        yield made


def ask(client: openai.OpenAI, text: Any, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": "tiny", "input": text, "max_output_tokens": 50, **fields}
    )


def test_conversation_continues_on_any_front_end(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any
) -> None:
    first = ask(client, "one", instructions="Be brief.")
    assert first.store
    second = ask(other, "two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    ask(client, "three", previous_response_id=second.id)
    assert prompt_of(engines) == (
        "<|user|>one<|end|><|assistant|>hello world<|end|>"
        "<|user|>two<|end|><|assistant|>hello world<|end|><|user|>three<|end|><|assistant|>"
    ), "instructions are those of one response"


def test_a_streamed_response_is_stored_before_its_end_is_sent(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="one") as stream:
        final = stream.until_done().get_final_response()
    assert client.responses.retrieve(final.id).output_text == "hello world"


def test_stored_response_is_retrieved_and_deleted(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    made = ask(client, "one")
    assert other.responses.retrieve(made.id) == made
    items: list[Any] = list(other.responses.input_items.list(made.id))
    assert [(item.type, item.content[0].text) for item in items] == [("message", "one")]
    other.responses.delete(made.id)
    for gone in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: ask(client, "two", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_responses_with_store_false_are_not_stored(client: openai.OpenAI) -> None:
    made = ask(client, "one", store=False)
    assert not made.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_unstorable_response_is_an_error_if_store_is_requested(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SqlBackend, tenant: str, *_: Any, **__: Any) -> None:
        raise DiskFull("/tmp/responses.sqlite: database or disk is full")

    monkeypatch.setattr(SqlBackend, "put", full)
    for fields in ({"store": True}, {"background": True}):
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, "one", **fields)
        assert caught.value.status_code == 503
    made = ask(client, "one")
    assert (made.output_text, made.store) == ("hello world", False)
    metrics = client.get("/../metrics", cast_to=httpx.Response).text
    assert 'swell_responses_not_kept_total{model_name="tiny"} 3.0' in metrics


def test_items_can_be_referenced(client: openai.OpenAI, engines: Any) -> None:
    made = ask(client, "one")
    reference = {"type": "item_reference", "id": made.output[0].id}
    ask(client, [reference, {"role": "user", "content": "two"}])
    assert prompt_of(engines) == ("<|assistant|>hello world<|end|><|user|>two<|end|><|assistant|>")
    for unknown in ("msg_" + "0" * 32 + "_0", "nonsense", made.output[0].id + "1"):
        with pytest.raises(openai.NotFoundError, match="not found"):
            ask(client, [{"type": "item_reference", "id": unknown}])


def test_referenced_items_are_part_of_the_conversation(client: openai.OpenAI, engines: Any) -> None:
    made = ask(client, "one")
    reference = {"type": "item_reference", "id": made.output[0].id}
    second = ask(client, [reference, {"role": "user", "content": "two"}])
    client.responses.delete(made.id)
    ask(client, "three", previous_response_id=second.id)
    assert prompt_of(engines) == (
        "<|assistant|>hello world<|end|><|user|>two<|end|><|assistant|>hello world<|end|>"
        "<|user|>three<|end|><|assistant|>"
    )


def test_invalid_call_of_earlier_turn_is_reported_on_its_source_field(
    client: openai.OpenAI,
) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 200}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [call])
    assert caught.value.param == "input[0].arguments"
    conversation = client.conversations.create(items=[call])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "two", conversation=conversation.id)
    assert caught.value.param == "conversation"


def test_a_conversation_grows_with_its_responses(client: openai.OpenAI, engines: Any) -> None:
    items: Any = [{"type": "message", "role": "user", "content": "zero"}]
    conversation = client.conversations.create(items=items, metadata={"a": "b"})
    made = ask(client, "one", conversation=conversation.id)
    assert made.conversation.id == conversation.id
    ask(client, "two", conversation={"id": conversation.id}, store=False)
    assert prompt_of(engines).startswith(
        "<|user|>zero<|end|><|user|>one<|end|><|assistant|>hello world<|end|><|user|>two<|end|>"
    )
    listed: list[Any] = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == [
        "zero", "one", "hello world", "two", "hello world"
    ]  # fmt: skip
    shown = client.conversations.items.retrieve(listed[1].id, conversation_id=conversation.id)
    assert shown == listed[1]
    client.conversations.items.delete(listed[1].id, conversation_id=conversation.id)
    client.conversations.items.create(conversation.id, items=items)
    assert len(list(client.conversations.items.list(conversation.id))) == 5
    client.conversations.update(conversation.id, metadata={"c": "d"})
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        ask(client, "three", conversation=conversation.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [{"role": "user", "content": ""}] * 21}, "items"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
    ],
)
def test_items_and_metadata_of_a_conversation_are_bounded(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.create(**fields)
    assert str(caught.value.param).startswith(param)
    metadata = {f"{number:02}{'k' * 62}": "v" * 512 for number in range(16)}
    items: Any = [{"role": "user", "content": ""}] * 20
    assert client.conversations.create(items=items, metadata=metadata).metadata == metadata


def ended(client: openai.OpenAI, id_: str) -> Any:
    found: list[Any] = []

    def is_ended() -> bool:
        found[:] = [client.responses.retrieve(id_)]
        return found[0].status not in ("queued", "in_progress")

    until(is_ended, "it ends")
    return found[0]


def test_response_is_generated_in_background(client: openai.OpenAI, other: openai.OpenAI) -> None:
    queued = ask(client, "one", background=True)
    assert queued.status == "queued"
    found = ended(other, queued.id)
    assert (found.status, found.output_text) == ("completed", "hello world")
    assert ask(other, "two", previous_response_id=queued.id).output_text == "hello world"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_background_response_can_be_cancelled(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any, elsewhere: bool
) -> None:
    engines.script = lambda stream: []
    queued = ask(client, "one", background=True)
    until(lambda: engines.streams, "it is being made")
    asked = other if elsewhere else client
    assert asked.responses.cancel(queued.id).status == "cancelled"
    assert ended(client, queued.id).status == "cancelled"
    until(engines.streams[-1].closed.is_set, "its stream is closed")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_response_deleted_during_generation_stays_deleted(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any, elsewhere: bool
) -> None:
    engines.script = lambda stream: []
    queued = ask(client, "one", background=True)
    until(lambda: engines.streams, "it is being made")
    (other if elsewhere else client).responses.delete(queued.id)
    until(engines.streams[-1].closed.is_set, "its stream is closed")
    engines.script = engines.answer("hello world")
    later = ended(client, ask(client, "two", background=True).id)
    assert later.status == "completed", "the store has done all that it was asked for before"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)


def test_background_failure_is_stored(client: openai.OpenAI) -> None:
    queued = ask(client, "one", background=True, max_output_tokens=10**6)
    found = ended(client, queued.id)
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "context_length_exceeded")


def events_of(client: openai.OpenAI, id_: str, **more: Any) -> list[Any]:
    return list(client.responses.retrieve(id_, stream=True, **more))


def test_events_of_a_background_response_can_be_replayed(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    events = list(ask(client, "one", background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    id_ = events[0].response.id
    for each in (client, other):
        assert events_of(each, id_) == events
        for number in range(len(events)):
            assert events_of(each, id_, starting_after=number) == events[number + 1 :]
    assert client.responses.retrieve(id_) == events[-1].response
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.get(f"/responses/{id_}?stream=true&starting_after=x", cast_to=dict)


def test_disconnected_client_can_resume_stream_on_any_front_end(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any
) -> None:
    engines.script = lambda stream: []
    stream = ask(client, "one", background=True, stream=True)
    answer = engines.answer("hello world")
    until(lambda: bool(engines.streams), "it runs")
    first, *rest = answer(engines.streams[-1])
    engines.streams[-1].feed(first)
    begun = [next(stream) for _ in range(4)]
    stream.close()
    engines.streams[-1].feed(*rest)
    events = events_of(other, begun[0].response.id, starting_after=begun[-1].sequence_number)
    assert events[0].sequence_number == 4
    assert events[-1].response.output_text == "hello world"


@pytest.mark.parametrize("config", [HttpConfig(sse_keep_alive=0.2)], indirect=True)
def test_followers_of_silent_response_get_unstored_comments(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any
) -> None:
    answer = engines.answer("hello world")
    engines.script = lambda stream: answer(stream)[:1]
    body = {"model": "tiny", "input": "one", "background": True, "stream": True}
    url = f"{client.base_url}responses"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        named = next(line for line in lines if '"id":"resp_' in line)
        assert ": keep-alive" in lines
    id_ = named.partition('"id":"')[2].partition('"')[0]
    url = f"{other.base_url}responses/{id_}?stream=true&starting_after=3"
    with httpx.stream("GET", url, timeout=PATIENCE) as stream:
        assert ": keep-alive" in stream.iter_lines()
    engines.streams[-1].feed(*answer(engines.streams[-1])[1:])
    events = events_of(client, id_)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "hello world"


def test_events_of_cancelled_response_end(
    client: openai.OpenAI, other: openai.OpenAI, engines: Any
) -> None:
    engines.script = lambda stream: engines.answer("hello world")(stream)[:1]
    stream = ask(client, "one", background=True, stream=True)
    id_ = next(stream).response.id
    assert other.responses.cancel(id_).status == "cancelled"
    assert "response.completed" not in [event.type for event in stream]
    assert "response.completed" not in [event.type for event in events_of(other, id_)]


def test_failure_is_the_last_event(client: openai.OpenAI, engines: Any) -> None:
    engines.script = lambda stream: [*engines.answer("hello world")(stream)[:1], RuntimeError("x")]
    events = list(ask(client, "one", background=True, stream=True))
    assert events[-1].type == "error"
    assert ended(client, made_by(events)).status == "failed"
    events = list(ask(client, "one", background=True, stream=True, max_output_tokens=10**6))
    assert [event.type for event in events] == ["response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"
    assert events_of(client, made_by(events)) == events


def made_by(events: Any) -> str:
    made: str = next(event.response.id for event in events if hasattr(event, "response"))
    return made


def test_events_of_dead_process_end_with_a_failure(
    client: openai.OpenAI,
    new_store: Callable[[], ResponseStore],
    engines: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.store.service.SILENCE", 0.5)
    events = list(ask(client, "one", background=True, stream=True))
    backend = new_store().backend
    record = backend.get("0", made_by(events))
    assert record is not None
    abandoned = msgspec.structs.replace(record, id="resp_" + "c" * 32, status="in_progress")
    backend.put("0", abandoned)
    (last,) = events_of(client, abandoned.id)
    assert (last.type, last.response.status) == ("response.failed", "failed")


def test_event_stream_survives_brief_store_failure(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list(ask(client, "one", background=True, stream=True))
    progress = SqlBackend.progress
    failures = iter(range(3))

    def failing(self: SqlBackend, tenant: str, id_: str, after: int) -> Any:
        if next(failures, None) is not None:
            raise BackendFailed("it is busy")
        return progress(self, tenant, id_, after)

    monkeypatch.setattr(SqlBackend, "progress", failing)
    assert events_of(client, made_by(events)) == events
    failures = iter(range(1000))
    monkeypatch.setattr("server.api.responses.journal._MAX_FAILURES", 2)
    (last,) = events_of(client, made_by(events))
    assert (last.type, last.code) == ("error", "server_error")


def test_only_background_responses_have_stored_events(client: openai.OpenAI) -> None:
    made = ask(client, "one")
    with pytest.raises(openai.BadRequestError) as caught:
        events_of(client, made.id)
    assert caught.value.param == "stream"


def test_last_of_too_many_events_is_stored(
    client: openai.OpenAI, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.responses.journal.MAX_STORED_EVENTS", 10)
    events = list(ask(client, "one", background=True, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "hello world"


@pytest.mark.parametrize("config", [GuardConfig(api_key=("secret", "another"))], indirect=True)
def test_stored_responses_are_private_to_tenant(client: openai.OpenAI) -> None:
    made = ask(client, "one")
    conversation = client.conversations.create()
    stranger = client.with_options(api_key="another")
    for peek in (
        lambda: stranger.responses.retrieve(made.id),
        lambda: stranger.responses.delete(made.id),
        lambda: stranger.responses.cancel(made.id),
        lambda: ask(stranger, "two", previous_response_id=made.id),
        lambda: ask(stranger, [{"type": "item_reference", "id": made.output[0].id}]),
        lambda: ask(stranger, "two", conversation=conversation.id),
        lambda: stranger.conversations.retrieve(conversation.id),
        lambda: stranger.conversations.delete(conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            peek()
    assert client.responses.retrieve(made.id) == made


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "a", "conversation": "b"}, "conversation"),
        ({"background": True, "store": False}, "background"),
    ],
)
def test_conflicting_fields_are_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "one", **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up"])
def test_invalid_queries_are_refused(client: openai.OpenAI, query: str) -> None:
    made = ask(client, "one")
    answer = client.get(f"/responses/{made.id}/input_items?limit=1", cast_to=dict)
    assert answer
    with pytest.raises(openai.BadRequestError):
        client.get(f"/responses/{made.id}/input_items?{query}", cast_to=dict)


def test_response_of_silent_process_counts_as_failed_until_next_beat(
    client: openai.OpenAI,
    new_store: Callable[[], ResponseStore],
    engines: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines.script = lambda stream: []
    queued = ask(client, "one", background=True)
    backend = new_store().backend
    record = backend.get("0", queued.id)
    assert record is not None
    silent = msgspec.structs.replace(record, id="resp_" + "a" * 32)

    def status_after(silence: float) -> str:
        monkeypatch.setattr("server.store.service.SILENCE", silence)
        return str(client.responses.retrieve(silent.id).status)

    def counts_as_failed() -> bool:
        return status_after(0.5) == "failed"

    backend.put("0", silent)
    assert status_after(PATIENCE) == "in_progress"
    until(counts_as_failed, "it is taken for failed")
    error = client.responses.retrieve(silent.id).error
    assert error is not None
    assert error.code == "server_error"
    backend.beat("0", [silent.id])
    assert status_after(PATIENCE) == "in_progress"
    until(counts_as_failed, "it is taken for failed again")
    backend.put("0", msgspec.structs.replace(silent, status="completed"))
    assert client.responses.retrieve(silent.id).error is None, "what finishes is not lost"
    client.responses.cancel(queued.id)


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_clock_changes_lose_no_responses(
    client: openai.OpenAI,
    new_app: Callable[[], FastAPI],
    served: Any,
    engines: Any,
    jump: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ask(client, "one")
    engines.script = lambda stream: []
    queued = ask(client, "one", background=True)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    with served(new_app()) as url, client_of(url) as later:
        assert later.responses.retrieve(queued.id).status == "in_progress"
        later.conversations.create()  # evicts entries, also by age
        assert later.responses.retrieve(made.id) == made
    client.responses.cancel(queued.id)


def test_too_long_conversation_is_refused_by_name(
    client: openai.OpenAI, new_store: Callable[[], ResponseStore]
) -> None:
    made = ask(client, "one")
    backend = new_store().backend
    record = backend.get("0", made.id)
    assert record is not None
    endless = msgspec.structs.replace(record, id="resp_" + "b" * 32, previous="resp_" + "b" * 32)
    backend.put("0", endless)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "two", previous_response_id=endless.id)
    assert caught.value.param == "previous_response_id"


def test_items_of_unfinished_responses_count_against_the_limit(
    client: openai.OpenAI,
) -> None:
    """Each is stored before the total number of turns is checked."""
    turns, previous = [{"role": "user", "content": ""}] * 1000, None
    for _ in range(3):
        made = ask(client, turns, background=True, previous_response_id=previous)
        previous = made.id
    with pytest.raises(openai.BadRequestError, match="more than 2048 items") as caught:
        ask(client, "on", previous_response_id=previous)
    assert caught.value.param == "previous_response_id"


def test_each_reference_to_an_item_counts(client: openai.OpenAI, engines: Any) -> None:
    engines.script = engines.answer("hello " * 600)
    made = ask(client, "one", max_output_tokens=3000)
    reference = {"type": "item_reference", "id": made.output[0].id}
    assert len(made.output_text) > 2500
    with pytest.raises(openai.BadRequestError, match="refers to more than"):
        ask(client, [reference] * 2000)


def test_requests_that_need_a_store_are_refused_without_one(http: Any) -> None:
    for field, value in {
        "store": True, "background": True, "previous_response_id": "a", "conversation": "a",
    }.items():  # fmt: skip
        answer = http.post("/v1/responses", {"model": "tiny", "input": "x", field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    answer = http.post("/v1/responses", {"model": "tiny", "input": "x"})
    assert answer.json()["store"] is False
    assert http.get("/v1/responses/resp_1").status_code == 404


def test_followers_of_background_responses_are_counted_by_admission(
    new_store: Callable[[], ResponseStore],
) -> None:
    store = new_store()
    http = SimpleNamespace(sse_keep_alive=0.0)
    services: Any = SimpleNamespace(store=store, config=SimpleNamespace(http=http))

    def request() -> Request:
        scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"stream=true"}
        return Request({**scope, "path_params": {"response_id": "resp_" + "0" * 32}})

    async def follow(id_: str) -> Any:
        try:
            return await retrieve(id_, request(), services)
        except ApiError as error:
            return error.status

    async def scenario() -> None:
        owner = _owner(request())
        body = b'{"background": true, "status": "in_progress"}'
        record = Record(
            id="resp_" + "0" * 32, tenant=owner, created=0.0, status="in_progress", body=body
        )
        await store.call(SqlBackend.put, owner, record)
        answers = await asyncio.gather(*(follow(record.id) for _ in range(200)))
        refused = [each for each in answers if each == 429]
        assert len(refused) == 200 - MAX_JOBS_OF_ONE, answers
        del answers  # clients disconnected before any response was sent
        gc.collect()
        while store.followers.exceeded(owner, MAX_JOBS_OF_ONE):
            await asyncio.sleep(0.01)
        await store.jobs.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
