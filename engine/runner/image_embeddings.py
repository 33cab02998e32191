"""What a runner keeps of encoded images, and which tokens of a step stand for them."""

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import BatchPlan, SlotImage
from engine.models.decoder import ImageTokens
from engine.models.device_copies import to_device
from engine.models.vision.siglip import VisionEncoder
from engine.runner.inputs import BatchRows, IntArray


class ImageEmbeddings:
    """Encodes images as plans say, and keeps what came of them as long as plans say."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self._kept: dict[bytes, Tensor] = {}
        self._images: dict[int, list[SlotImage]] = {}
        """Of the sequences that have some, by slot."""

    def update(self, plan: BatchPlan) -> None:
        """Take the sequences that start, and encode what is to be encoded.

        A plan may come again that was not carried out to its end.
        """
        for start in plan.starting:
            self._images.pop(start.slot, None)
            if start.images:
                self._images[start.slot] = start.images
        for digest in plan.forgotten:
            self._kept.pop(digest, None)
        for each in plan.encoded:
            if each.digest not in self._kept:
                embeddings = self._encoder.encode(each.pixels, each.height, each.width)
                self._kept[each.digest] = embeddings

    def of_step(self, rows: BatchRows) -> ImageTokens | None:
        """Return the tokens of a step that stand for images."""
        if not self._images:
            return None
        tokens: list[IntArray] = []
        embeddings: list[Tensor] = []
        for row, slot in enumerate(rows.slots.tolist()):
            start = int(rows.starts[row])
            end, first = start + int(rows.counts[row]), int(rows.first_token[row]) - start
            for image in self._images.get(slot, ()):
                low, high = max(start, image.position), min(end, image.end)
                if low < high:
                    kept = self._kept[image.digest]
                    tokens.append(np.arange(first + low, first + high))
                    embeddings.append(kept[low - image.position : high - image.position])
        if not tokens:
            return None
        joined = torch.cat(embeddings)
        return ImageTokens(to_device(np.concatenate(tokens), joined.device), joined)
