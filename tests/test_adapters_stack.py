"""Adapters on a whole stack: loaded once, they are everywhere, whoever starts again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.adapter_files import write_adapter
from tests.support.http import ADMIN_KEY, MODEL, call, complete, completion, everywhere, fetch
from tests.support.lockstep import utility
from tests.support.metrics import num_running, scrape, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

TOKENS = 48
"""Long enough to be under way when engines die."""


def load(url: str, name: str, path: str, **more: object) -> str:
    answer = fetch(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})
    return "" if answer.status == 200 else f"{answer.status} {answer.error['message']}"


def unload(url: str, name: str) -> int:
    return fetch(f"{url}/v1/unload_lora_adapter", {"lora_name": name}).status


def models(url: str) -> dict[str, Any]:
    return {each["id"]: each for each in call(f"{url}/v1/models")["data"]}


def loaded(url: str) -> dict[int, Any]:
    """Return the adapters of the engines that tell: one that has just died does not."""
    answers = call(f"{url}/admin/utilities", {"name": "list_loras", "rank": None})["answers"]
    return {each["rank"]: each["result"] for each in answers if each["error"] is None}


def say(url: str, model: str = MODEL, tokens: int = 9) -> str:
    """Return what a simulated engine draws with a seed."""
    return complete(url, "To be", tokens, model=model, seed=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("art", "law", "sql")):
        write_adapter(tmp_path / "adapters" / name, seed=seed, rank=4, size=0.3)
    write_adapter(tmp_path / "secret")
    return tmp_path / "adapters"


def test_adapter_loaded_once_is_available_everywhere(root: Path) -> None:
    flags = (
        "--executor", "simulated", "--simulated-step-us", "10000", "--admin-key", ADMIN_KEY,
        "--data-parallel-size", "2", "--api-server-count", "2", "--enable-lora",
        "--min-ready-engines", "2",
        "--lora-dir", str(root), "--lora-modules", f"law={root / 'law'}",
        "--max-lora-rank", "4", "--max-cpu-loras", "3",
    )  # fmt: skip
    with RunningStack(*flags) as stack, ThreadPoolExecutor(8) as pool:
        url = stack.url
        assert models(url)["law"]["parent"] == MODEL
        assert fetch(f"{url}/v1/completions", completion("x", 2, model="sql")).status == 404
        assert load(url, "sql", "sql") == ""
        plain, law = say(url), say(url, "law")
        answers = [pool.submit(say, url, "sql") for _ in range(40)]
        [sql] = {answer.result() for answer in answers}
        assert len({plain, law, sql}) == 3
        assert models(url)["sql"]["root"] == "sql"
        assert {tuple(each) for each in utility(url, "list_loras").values()} == {("law", "sql")}

        # A stream goes on with what it began with while another takes the name.
        long = pool.submit(say, url, "sql", 400)
        until(
            lambda: 'running_lora_adapters="sql"' in scrape(url) or long.done(),
            "it runs, or has run",
        )
        assert "already" in load(url, "sql", "art")
        assert load(url, "sql", "art", load_inplace=True) == ""
        assert say(url, "sql") not in (plain, law, sql)
        assert long.result().startswith(sql)
        loaded = 'lora_loaded{engine="0",lora_name="'
        until(lambda: scrape(url).count(loaded) == 2, "the version before is forgotten")

        refused = {
            "outside": load(url, "x", "../secret"),
            "not a directory": load(url, "x", "nothing"),
            "the model itself": load(url, MODEL, "sql"),
            "the served model is": load(url, "x", "sql", base_model_name="other"),
        }
        write_adapter(root / "big", rank=8)
        refused["--max-lora-rank 4"] = load(url, "x", "big")
        (root / "big" / "adapter_model.safetensors").unlink()
        refused["no adapter_model.safetensors"] = load(url, "x", "big")
        assert load(url, "third", "sql") == ""
        refused["--max-cpu-loras"] = load(url, "x", "law")
        for reason, answer in refused.items():
            assert answer.startswith("400 "), answer
            assert reason in answer

        assert unload(url, "sql") == 200
        asked = [
            pool.submit(fetch, f"{url}/v1/completions", completion("x", 2, model="sql"))
            for _ in range(20)
        ]
        assert {answer.result().status for answer in asked} == {404}
        assert unload(url, "sql") == 404
        until(lambda: total(url, "lora_requests_total") >= 43, "all are counted")


def test_engines_and_the_coordinator_die_and_every_request_keeps_its_adapter(root: Path) -> None:
    flags = (
        "--batch-invariant", "--admin-key", ADMIN_KEY, "--data-parallel-size", "2",
        "--api-server-count", "2", "--enable-lora", "--lora-dir", str(root), "--max-loras", "2",
        "--num-kv-blocks", "512", "--max-model-len", "512",
    )  # fmt: skip
    names = ["art", "law", "sql", MODEL]
    with RunningStack(*flags) as stack, ThreadPoolExecutor(16) as pool:
        url = stack.url
        for name in names[:3]:
            assert load(url, name, name) == ""
        expected = {name: complete(url, "ROMEO:", TOKENS, model=name) for name in names}
        assert len(set(expected.values())) == 4

        def ask_all() -> list[Any]:
            return [
                (name, pool.submit(complete, url, "ROMEO:", TOKENS, model=name))
                for name in names * 2
            ]

        asked = ask_all()
        until(
            lambda: num_running(url) >= 4 or all(answer.done() for _, answer in asked), "they run"
        )
        stack.processes()["engine 0"].kill()
        stack.processes()["coordinator"].kill()
        for name, answer in asked:
            assert answer.result() == expected[name], name
        until(
            lambda: everywhere(lambda: models(url).keys() >= set(names)), "the adapters are known"
        )

        def all_are_back() -> bool:
            engines = call(f"{url}/admin/engines")["engines"]
            return [engine["ready"] for engine in engines].count(True) == 2

        def both_have(names: tuple[str, ...]) -> bool:
            held = loaded(url)
            return set(held) == {0, 1} and tuple(held[0]) == names and held[0] == held[1]

        until(all_are_back, "the engine is back")
        until(lambda: both_have(("art", "law", "sql")), "both tell that they have all")
        for rank in (0, 1):
            for name in names[1:3]:
                assert complete(url, "ROMEO:", TOKENS, rank, model=name) == expected[name]
        assert load(url, "new", "law") == "", "the new coordinator decides now"
        assert complete(url, "ROMEO:", TOKENS, model="new") == expected["law"]
