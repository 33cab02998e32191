"""Files in the supervisor's current directory never replace Swell's modules on Ray nodes."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ray.cluster import serve
from tests.support.http import call, completion

if TYPE_CHECKING:
    from tests.ray.nodes import Nodes

pytestmark = pytest.mark.ray


def test_engines_on_ray_start_from_a_directory_that_holds_a_server_py(
    nodes: "Nodes", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("server", "engine", "coordinator", "msgspec"):
        mark = tmp_path / f"{name}.ran"
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    with serve(nodes, "--data-parallel-size", "1") as stack:
        assert call(f"{stack.url}/v1/completions", completion("Once", 4))["choices"]
    assert [each.name for each in tmp_path.glob("*.ran")] == []
