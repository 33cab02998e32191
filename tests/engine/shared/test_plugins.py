"""Entry points of installed packages, loaded by name."""

from pathlib import Path

import pytest

from engine.shared.plugins import BadPlugin, instance_of, load_plugin, offered
from tests.support.plugins import offer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plugin_of_tests.py").write_text("NUMBER = 5\ndef fail(): raise KeyError('inside')")
    (tmp_path / "plugin_broken.py").write_text("import there_is_no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    offer(tmp_path, "swell.tests", number="plugin_of_tests:NUMBER", fails="plugin_of_tests:fail")
    return tmp_path


@pytest.mark.usefixtures("site")
def test_a_plugin_is_loaded_by_its_name() -> None:
    assert load_plugin("swell.tests", "number", "--test", instance_of(int)) == 5
    assert offered("swell.tests") == ["fails", "number"]


@pytest.mark.usefixtures("site")
def test_missing_plugin_is_refused_with_installed_ones() -> None:
    with pytest.raises(BadPlugin, match=r"--test other: .*'swell\.tests'; there are fails, number"):
        load_plugin("swell.tests", "other", "--test", instance_of(int))


def test_a_plugin_that_fails_is_named_with_its_package_and_the_reason(site: Path) -> None:
    offer(site, "swell.tests", broken="plugin_broken:X", gone="plugin_of_tests:GONE")
    package = "of offers-broken-gone 2.5 cannot be used"
    with pytest.raises(BadPlugin, match=f"--test broken: .*{package}.*no_such_module"):
        load_plugin("swell.tests", "broken", "--test", instance_of(int))
    with pytest.raises(BadPlugin, match=f"--test gone: .*{package}.*AttributeError.*GONE"):
        load_plugin("swell.tests", "gone", "--test", instance_of(int))
    with pytest.raises(BadPlugin, match="TypeError: expected str, got int"):
        load_plugin("swell.tests", "number", "--test", instance_of(str))
    with pytest.raises(BadPlugin, match="KeyError: 'inside'"):
        load_plugin("swell.tests", "fails", "--test", lambda found: found())


def test_two_plugins_of_the_same_name_are_refused(site: Path) -> None:
    offer(site, "swell.tests", number="another:NUMBER")
    with pytest.raises(BadPlugin, match=r"several .*: another:NUMBER, plugin_of_tests:NUMBER"):
        load_plugin("swell.tests", "number", "--test", instance_of(int))
