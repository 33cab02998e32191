"""Two models behind one address: each request is answered by the stack that has its model."""

import json
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import fetch
from tests.support.waiting import until

pytestmark = pytest.mark.stack


def test_requests_are_answered_by_stack_with_their_model(tmp_path: Path) -> None:
    routes = tmp_path / "routes.yaml"

    def status(model: str) -> int:
        body = {"model": model, "prompt": "Act", "max_tokens": 2}
        return fetch(f"{url}/v1/completions", body).status

    simulated = ("--executor", "simulated")
    with RunningStack(*simulated, "--served-model-name", "other") as other:
        routes.write_text(json.dumps({"other": other.url}))
        with RunningStack(
            *simulated, "--served-model-name", "own", "--model-routes", str(routes)
        ) as own:
            url = own.url
            assert [status(model) for model in ("own", "other", "neither")] == [200, 200, 404]
            routes.write_text("{}")
            until(lambda: status("other") == 404, "the model is taken away")
            assert status("own") == 200
