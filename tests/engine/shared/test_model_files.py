"""Default served names of models."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from engine.shared.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME, ModelConfig
from engine.shared.model_files import ModelNotFound, model_directory, served_names


def test_bundled_model_has_same_name_under_any_path(tmp_path: Path) -> None:
    link = tmp_path / "a-link"
    link.symlink_to(BUNDLED_MODEL)
    parent = tmp_path / "another"
    parent.symlink_to(BUNDLED_MODEL.parent)
    for path in (BUNDLED_MODEL, link, parent / BUNDLED_MODEL.name, f"{BUNDLED_MODEL}/"):
        assert served_names(ModelConfig(model=str(path))) == (BUNDLED_MODEL_NAME,)


def test_model_is_named_after_directory_and_not_its_link(tmp_path: Path) -> None:
    directory = tmp_path / BUNDLED_MODEL.name
    directory.mkdir()
    (tmp_path / "a-link").symlink_to(directory)
    for path in (directory, tmp_path / "a-link"):
        assert served_names(ModelConfig(model=str(path))) == (BUNDLED_MODEL.name,)
    assert served_names(ModelConfig(model="org/name")) == ("org/name",)


def test_unreadable_directory_is_refused_with_command_to_fix() -> None:
    # Not below tmp_path, which other users may not enter.
    root = Path(tempfile.mkdtemp(prefix="swell-rights-"))
    user = os.geteuid()
    try:
        root.chmod(0o711)
        closed = root / "model"
        closed.mkdir()
        weights = closed / "model.safetensors"
        weights.touch()
        (closed / "config.json").write_text("{}")
        for path, denied in ((weights, weights), (closed, closed), (root, closed)):
            path.chmod(0)
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(ModelNotFound, match=re.escape(str(denied))) as refused:
                model_directory(ModelConfig(model=str(closed)), weights=True)
            os.seteuid(user)
            assert f"chmod -R a+rX {closed}" in str(refused.value)
            path.chmod(0o711 if path.is_dir() else 0o644)
    finally:
        os.seteuid(user)
        shutil.rmtree(root)
