"""Image support of the served model; imports Pillow only if the model has it."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from server.text.placeholders import Placeholders

if TYPE_CHECKING:
    from server.media.processors import ImageProcessor

logger = logging.getLogger(__name__)


def served_processor(model: Path) -> "ImageProcessor | None":
    """Return the image processor of the model in a directory, None if images are not supported."""
    config = model / "config.json"
    if not config.is_file() or b'"vision_config"' not in config.read_bytes():
        return None
    from server.media.processors import BadProcessor, image_processor  # with Pillow

    try:
        processor = image_processor(model)
    except BadProcessor as error:
        logger.warning("the model is served without images: %s", error)
        return None
    if processor is None:
        logger.warning("images are not served with this kind of model: it reads text only")
    return processor


def placeholders_of(processor: "ImageProcessor | None") -> Placeholders | None:
    """Return the image placeholders, which text from clients must not contain, or None."""
    return None if processor is None else Placeholders((processor.marker, processor.token))
