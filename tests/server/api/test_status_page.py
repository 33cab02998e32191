import re
from typing import Any

import msgspec
import pytest

from engine.shared.messages import (
    ClusterView,
    EngineCounters,
    EngineEntry,
    EngineSetup,
    EngineStats,
    MissingEngine,
)
from server.config import FrontEndConfig, GuardConfig
from tests.server.conftest import app_of, prompt_of
from tests.support.chromium import needs_chromium


def engine(rank: int, *, ready: bool = True, **counts: Any) -> EngineEntry:
    stats = {
        "version": 1, "wave": 4, "step": 100, "waiting": 0, "running": 0, "kv_usage": 0.0,
        "queued_prefill_tokens": 0,
    }  # fmt: skip
    return EngineEntry(
        rank=rank,
        incarnation=1000 + rank,
        ready=ready,
        host="node-a",
        restarts=0,
        setup=EngineSetup(64, 16, 512, "print", is_batch_invariant=True) if ready else None,
        stats=EngineStats(rank, 1000 + rank, **{**stats, **counts}) if ready else None,
    )


def test_missing_engines_are_shown_with_reason(http: Any, engines: Any) -> None:
    lost = [MissingEngine(1, "silent", 75.0), MissingEngine(2, "not_joined", 5.0)]
    engines.view = msgspec.structs.replace(view(engine(0)), expected=3, missing=lost)
    body = http.get("/status.json").json()
    assert body["num_expected"] == 3
    assert body["missing"] == [
        {"rank": 1, "reason": "silent", "age": 75.0},
        {"rank": 2, "reason": "not_joined", "age": 5.0},
    ]


def view(*engines: EngineEntry, running: bool = True) -> ClusterView:
    return ClusterView(
        epoch=1, version=1, wave=4, running=running, engines=list(engines), num_front_ends=2,
        wakeups_total={"front_end": 3},
    )  # fmt: skip


def test_status_equals_cluster_view(http: Any, engines: Any) -> None:
    busy = engine(
        0, waiting=2, running=5, kv_usage=0.75, counters=EngineCounters(generation_tokens=900)
    )
    engines.view = view(engine(1, ready=False), busy)
    engines.stats_age = {0: 0.25}
    response = http.get("/status.json")
    assert response.headers["cache-control"] == "no-store"
    body = response.json()
    assert body["models"] == ["tiny", "also-tiny"]
    assert (body["ready"], body["running"], body["wave"], body["num_front_ends"]) == (
        True, True, 4, 2
    )  # fmt: skip
    assert body["wakeups_total"] == {"front_end": 3}
    first, second = body["engines"]
    assert (first["rank"], first["ready"], first["host"]) == (0, True, "node-a")
    assert (first["num_kv_blocks"], first["block_size"], first["stats_age"]) == (64, 16, 0.25)
    assert (first["batch_invariant"], second["batch_invariant"]) == (True, None)
    counts = first["counts"]
    assert (counts["waiting"], counts["running"], counts["kv_usage"]) == (2, 5, 0.75)
    assert counts["generation_tokens_total"] == 900
    assert (second["rank"], second["ready"], second["counts"]) == (1, False, None)


def test_status_is_empty_before_first_view(http: Any, engines: Any) -> None:
    engines.ready = False
    body = http.get("/status.json").json()
    assert (body["ready"], body["running"], body["engines"]) == (False, False, [])


def test_times_to_first_token_are_summed(http: Any) -> None:
    for _ in range(3):
        http.complete()
    times = http.get("/status.json").json()["first_token_times"]
    assert times["count"] == 3
    assert 0 < times["sum"] < 60


def test_the_status_is_documented(http: Any) -> None:
    document = http.get("/openapi.json").json()
    answer = document["paths"]["/status.json"]["get"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/StatusResponse"
    }
    assert "EngineOverview" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html"),
        ("/status.css", "text/css"),
        *((f"/{name}.js", "text/javascript") for name in ("status", "access", "playground")),
    ],
)
def test_page_and_files_allow_no_foreign_content(http: Any, path: str, media_type: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == f"{media_type}; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    used = re.findall(r"""(?:src|href)=["']([^"']+)|url\(([^)]+)""", response.text)
    assert not [name for names in used for name in names if "//" in name.removeprefix("data:image")
                and not name.startswith("data:")]  # fmt: skip


def text_of(browser: Any, selector: str) -> str:
    return str(browser.run(f"document.querySelector({selector!r}).innerText"))


@needs_chromium
def test_the_page_shows_engines_and_rates_as_they_change(
    browser: Any, app: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0, running=5, waiting=2, kv_usage=0.5), engine(1, ready=False))
    with served(app) as url:
        browser.open(url)
        browser.wait_until("document.querySelectorAll('#engines tr').length === 2")
        first = text_of(browser, "#engines tr:nth-child(1)")
        assert "queueing" in first
        assert "50 %" in first
        assert "starting" in text_of(browser, "#engines tr:nth-child(2)")
        assert text_of(browser, "#state") == "running"
        assert text_of(browser, "#wave") == "4"
        assert text_of(browser, "#engines-title") == "Engines: 1 of 2 ready"

        engines.view = view(
            engine(0, counters=EngineCounters(generation_tokens=5000)), running=False
        )
        browser.wait_until("document.getElementById('token-rate').innerText !== '0'")
        browser.wait_until("document.querySelectorAll('#engines tr').length === 1")
        assert "idle" in text_of(browser, "#engines")
        assert text_of(browser, "#state") == "ready"
        assert text_of(browser, "#wakeups") == "idle; woken 3×"
        path = browser.run("document.querySelector('#token-spark .line').getAttribute('d')")
        assert path.startswith("M")
    browser.wait_until("!document.getElementById('trouble').hidden")
    assert text_of(browser, "#state") == "no connection"


def send(browser: Any, text: str) -> None:
    """Type a message and press Enter, then wait for the end of the answer."""
    browser.run("facts.textContent = ''; document.getElementById('prompt').focus()")
    browser.press(f"{text}\r")
    browser.wait_until("document.getElementById('stop').disabled && facts.innerText !== ''")


@needs_chromium
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_playground_streams(
    browser: Any, app: Any, engines: Any, served: Any, endpoint: str
) -> None:
    engines.view = view(engine(0))
    engines.script = engines.answer("hello <b>again</b>")
    with served(app) as url:
        browser.open(url)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        browser.run(
            f"document.getElementById('endpoint').value = '{endpoint}';"
            "document.getElementById('endpoint').dispatchEvent(new Event('change'))"
        )
        send(browser, "the quick fox")
        assert "output tokens" in text_of(browser, "#facts")
        assert text_of(browser, ".assistant").endswith("hello <b>again</b>")
    prompt = prompt_of(engines)
    assert "the quick fox" in prompt


@needs_chromium
def test_the_page_of_an_embedding_model_compares_texts(
    browser: Any, pooling_http: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    with served(pooling_http().app) as url:
        browser.open(url)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        browser.run(
            "document.getElementById('prompt').value = 'the quick fox\\nthe lazy dog';"
            "document.getElementById('composer').requestSubmit()"
        )
        browser.wait_until("document.getElementById('facts').innerText !== ''")
        assert text_of(browser, "#facts").startswith("Cosine similarities of 2 vectors")
        browser.wait_until("document.getElementById('first-tile').hidden")
        assert text_of(browser, "#token-title") == "Prompt tokens/s"


@needs_chromium
def test_conversation_keeps_history_and_shows_markdown(
    browser: Any, app: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    engines.script = engines.answer("the **old** fox")
    with served(app) as url:
        browser.open(url)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        browser.run("document.getElementById('system').value = 'be brief'")
        send(browser, "first question")
        assert browser.run("document.querySelector('.assistant strong').innerText") == "old"
        send(browser, "second question")
        assert browser.run("document.querySelectorAll('.assistant').length") == 2
        browser.run("document.getElementById('clear').click()")
        assert browser.run("document.querySelectorAll('.message').length") == 0
    prompt = prompt_of(engines)
    told = [prompt.index(text) for text in ("be brief", "first question", "second question")]
    assert told == sorted(told)
    assert "the **old** fox" in prompt


@needs_chromium
def test_the_playground_stops_and_shows_errors(
    browser: Any, app: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    engines.script = lambda stream: engines.answer("hello world")(stream)[:2]
    with served(app) as url:
        browser.open(url)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        browser.run(
            "document.getElementById('prompt').value = 'hi';"
            "document.getElementById('composer').requestSubmit()"
        )
        browser.wait_until("document.querySelector('.assistant')?.innerText.length > 0")
        browser.run("document.getElementById('stop').click()")
        browser.wait_until("document.getElementById('facts').innerText === 'stopped'")
        browser.run("document.getElementById('temperature').value = 5")
        send(browser, "again")
        assert text_of(browser, "#facts").startswith("failed: temperature")


@needs_chromium
def test_api_page_loads_no_foreign_content(
    browser: Any, app: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    with served(app) as url:
        browser.open(f"{url}/docs")
        browser.wait_until("document.querySelectorAll('.opblock').length > 10")
        fetched = browser.run(
            "performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"
        )
        assert set(fetched) == {url}


@needs_chromium
def test_page_shows_nothing_before_a_key_is_entered(
    browser: Any, config: FrontEndConfig, engines: Any, tokenizer: Any, served: Any
) -> None:
    engines.view = view(engine(0, running=3))
    engines.script = engines.answer("hello again")
    guarded = msgspec.structs.replace(config, guards=GuardConfig(api_key=("secret",)))
    with served(app_of(guarded, engines, tokenizer)) as url:
        browser.open(url)
        browser.wait_until("document.getElementById('state').innerText === 'locked'")
        assert "needs an API key" in text_of(browser, "#trouble")
        assert browser.run("document.querySelectorAll('#engines tr td').length") == 0
        assert browser.run("document.getElementById('no-engines').hidden"), "nobody knows"
        assert browser.run("document.activeElement.id") == "api-key"

        browser.press("wrong\r")
        browser.wait_until("document.getElementById('trouble').innerText.includes('not accept')")
        browser.run("document.getElementById('api-key').value = ''")
        browser.press("secret\r")
        browser.wait_until("document.getElementById('state').innerText === 'running'")
        assert browser.run("document.getElementById('trouble').hidden") is True
        assert "secret" not in browser.run("location.href")
        assert text_of(browser, "#engines-title") == "Engines: 1 of 1 ready"

        browser.wait_until("document.getElementById('model').value === 'tiny'")
        send(browser, "hi")
        assert text_of(browser, ".assistant") == "hello again"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_a_phone_in_light_and_dark_mode(
    browser: Any, app: Any, engines: Any, served: Any, dark: bool
) -> None:
    engines.view = view(*(engine(rank, running=3) for rank in range(3)))
    with served(app) as url:
        browser.open(url, width=360, height=740, dark=dark)
        browser.wait_until("document.querySelectorAll('#engines tr').length === 3")
        assert browser.run("document.documentElement.scrollWidth") <= 360
        assert browser.run("document.getElementById('send').getBoundingClientRect().bottom") < 740
        assert browser.run("document.getElementById('access').hidden"), "this server has no keys"
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(16, 21, 28)") is dark
        unnamed = browser.run(
            "[...document.querySelectorAll('input, select, textarea, button')]"
            ".filter((each) => !(each.labels?.length || each.innerText)).length"
        )
        assert unnamed == 0
        assert browser.console == []


@needs_chromium
def test_a_table_of_an_answer_stays_a_table_on_a_phone(
    browser: Any, app: Any, engines: Any, served: Any
) -> None:
    engines.view = view(engine(0))
    engines.script = engines.answer("| fox | river |\n|---|---|\n| old | deep |")
    with served(app) as url:
        browser.open(url, width=360, height=740)
        browser.wait_until("document.getElementById('model').value === 'tiny'")
        send(browser, "draw a table")
        places = browser.run(
            "[...document.querySelectorAll('.markdown th, .markdown td')].map((each) => "
            "{ const box = each.getBoundingClientRect(); return [box.left, box.top]; })"
        )
    (left, top), (right, beside), (below, lower), _ = places
    assert top == beside, "two headings are in one row"
    assert left == below < right
    assert lower > top
