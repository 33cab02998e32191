"""Generated and hand-written pages agree with the code."""

import re
from pathlib import Path

import pytest

from engine.shared.version import SWELL_VERSION
from scripts.write_settings_doc import TARGET, render

ROOT = Path(__file__).parent.parent


def test_the_settings_page_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run `make docs`"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docker/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:engine|server|coordinator|tests|benchmarks|scripts|docs)/[\w/.]+)`", text
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
    assert "@@" not in text


def test_the_version_is_the_same_everywhere() -> None:
    places = {
        "helm/swell/Chart.yaml": r'(?m)^(?:version|appVersion): "?([\d.]+)"?$',
        "docker/compose.yaml": r"TAG:-([\d.]+)}",
        "docker/compose.cuda.yaml": r"TAG:-([\d.]+)}",
    }
    found = {
        path: set(re.findall(where, (ROOT / path).read_text())) for path, where in places.items()
    }
    assert found == {path: {SWELL_VERSION} for path in places}
