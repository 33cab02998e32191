"""The first layers of a model are a model of their own."""

import json
from pathlib import Path

import pytest

from benchmarks.cut_model import cut_model
from tests.engine.serving import request, serve
from tests.engine.tiny_models import save_tiny_model

REQUESTS = [request(1, list(range(40)), temperature=0, max_tokens=20)]


def test_a_cut_model_drafts_for_the_whole(tmp_path: Path) -> None:
    whole = save_tiny_model("llama", tmp_path / "whole", seed=0).directory
    (expected,), _ = serve(whole, REQUESTS, dtype="float32")
    for layers in (2, 3):
        part = tmp_path / str(layers)
        cut_model(str(whole), layers, part)
        assert json.loads((part / "config.json").read_text())["num_hidden_layers"] == layers
        (answer,), stats = serve(whole, REQUESTS, dtype="float32", speculative_model=str(part))
        assert answer.tokens == expected.tokens
        counters = stats.counters
        all_right = counters.spec_accepted_tokens == counters.spec_draft_tokens
        assert all_right == (layers == 3)


def test_more_layers_than_there_are_are_refused(tmp_path: Path) -> None:
    whole = save_tiny_model("llama", tmp_path / "whole", seed=0).directory
    with pytest.raises(ValueError, match="of 3 layers"):
        cut_model(str(whole), 4, tmp_path / "part")
