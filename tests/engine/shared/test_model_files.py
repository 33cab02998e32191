"""By which names a model is served that nobody has named."""

from pathlib import Path

from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME, ModelConfig
from engine.shared.model_files import served_names


def test_the_bundled_model_has_its_name_by_whatever_path(tmp_path: Path) -> None:
    link = tmp_path / "a-link"
    link.symlink_to(BUNDLED_MODEL)
    parent = tmp_path / "another"
    parent.symlink_to(BUNDLED_MODEL.parent)
    for path in (BUNDLED_MODEL, link, parent / BUNDLED_MODEL.name, f"{BUNDLED_MODEL}/"):
        assert served_names(ModelConfig(model=str(path))) == (BUNDLED_MODEL_NAME,)


def test_another_directory_is_called_as_it_is_and_not_as_its_link(tmp_path: Path) -> None:
    directory = tmp_path / BUNDLED_MODEL.name
    directory.mkdir()
    (tmp_path / "a-link").symlink_to(directory)
    for path in (directory, tmp_path / "a-link"):
        assert served_names(ModelConfig(model=str(path))) == (BUNDLED_MODEL.name,)
    assert served_names(ModelConfig(model="org/name")) == ("org/name",)
