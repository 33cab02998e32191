"""Image support of a model is determined from its files before it is served."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.media.served import placeholders_of, served_processor

VISION = {"vision_config": {"image_size": 32, "patch_size": 8}}


def test_a_model_that_takes_images_has_reserved_texts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **VISION}))
    placeholders = placeholders_of(served_processor(tmp_path))
    assert placeholders is not None
    assert placeholders.texts == ("<start_of_image>", "<image_soft_token>")


def test_model_with_unknown_processor_is_served_without_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **VISION}))
    (tmp_path / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}')
    assert served_processor(tmp_path) is None
    assert "do_pan_and_scan is not served" in caplog.text


def test_unknown_model_type_is_reported_as_text_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", **VISION}))
    assert served_processor(tmp_path) is None
    assert "images are not served with this kind of model: it reads text only" in caplog.text


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}])
def test_text_model_does_not_need_pillow(tmp_path: Path, config: dict[str, str] | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    program = (
        "import sys, pathlib\n"
        "from server.media.served import placeholders_of, served_processor\n"
        f"assert placeholders_of(served_processor(pathlib.Path({str(tmp_path)!r}))) is None\n"
        "sys.exit('PIL' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
