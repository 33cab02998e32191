"""Embeddings of encoded images, and their placement among a step's tokens."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import BatchPlan, SlotImage
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.device_copies import to_device
from engine.models.step import ImageTokens, WholeImages
from engine.models.vision.loading import VisionEncoder
from engine.runner.inputs import BatchRows, whole_images
from engine.runner.slots import IntArray, SlotTable


class ImageEmbeddings:
    """Encodes images and caches their embeddings as plans direct."""

    def __init__(self, encoder: VisionEncoder, model: Decoder) -> None:
        """Encode with `encoder` for `model`."""
        self._encoder = encoder
        self._model = model
        self._has_grid = any(rope.sections for rope in model.spec.distinct_ropes)
        self._cached: dict[bytes, Tensor] = {}
        self._images: dict[int, list[SlotImage]] = {}
        """Images of sequences that have any, by slot."""
        self._saved_by_all: dict[int, int] = {}
        """By slot: number of tokens minus number of positions of all its images."""

    def update(self, plan: BatchPlan) -> None:
        """Process starting sequences, encode new images and drop evicted ones.

        Idempotent, as a plan that was not completed can be repeated.
        """
        for start in plan.starting:
            self._images.pop(start.slot, None)
            if start.images:
                self._images[start.slot] = start.images
                self._saved_by_all[start.slot] = sum(map(self._saved, start.images))
        for digest in plan.evicted_images:
            self._cached.pop(digest, None)
        for each in plan.encoded:
            if each.digest not in self._cached:
                embeddings = self._encoder.encode(each.pixels, each.height, each.width)
                self._cached[each.digest] = embeddings

    def place(self, rows: BatchRows) -> BatchRows:
        """Return the rows with the rotary positions of their tokens."""
        if not self._has_grid or not self._images:
            return rows
        turns = np.tile(rows.positions, (3, 1))
        for row, slot in enumerate(rows.slots.tolist()):
            images = self._images.get(slot)
            if not images:
                continue
            start, first = int(rows.starts[row]), int(rows.first_token[row])
            part = turns[:, first : first + int(rows.counts[row])]
            if start < images[-1].end:
                self._count_grids(part, images, start)
            else:
                part -= self._saved_by_all[slot]
        is_text = bool((turns == turns[0]).all())
        return msgspec.structs.replace(rows, turns=turns[0] if is_text else turns)

    def _count_grids(self, positions: IntArray, images: Sequence[SlotImage], start: int) -> None:
        """Write the (time, row, column) positions [3, tokens] of tokens from `start` on.

        An image advances the position by the larger of its rows and columns. Its tokens have its
        first position as their time, and count rows and columns from there.

        Args:
            positions: initially those of text alone; modified.
        """
        end, saved = start + positions.shape[1], 0
        for image in images:
            low, high = max(start, image.position), min(end, image.end)
            if low < high:
                offsets, (_, width) = np.arange(low, high) - image.position, self._grid(image)
                within = np.stack((np.zeros_like(offsets), offsets // width, offsets % width))
                positions[:, low - start : high - start] = image.position - saved + within
            saved += self._saved(image)
            positions[:, max(0, image.end - start) :] -= self._saved(image)

    def _grid(self, image: SlotImage) -> tuple[int, int]:
        return self._encoder.spec.grid(image.height, image.width)

    def _saved(self, image: SlotImage) -> int:
        """Return the number of tokens minus the number of positions of an image."""
        return image.num_tokens - max(self._grid(image))

    def of_step(self, rows: BatchRows, table: SlotTable) -> ImageTokens | None:
        """Return the image tokens of a step; `table` has the slots of the rows."""
        if not self._images:
            return None
        shown: list[tuple[SlotImage, int, int]] = []
        """Images with their sequence's slot and the step index at which its first token would be.
        """
        tokens: list[IntArray] = []
        embeddings: list[Tensor] = []
        for row, slot in enumerate(rows.slots.tolist()):
            start = int(rows.starts[row])
            end, first = start + int(rows.counts[row]), int(rows.first_token[row]) - start
            for image in self._images.get(slot, ()):
                low, high = max(start, image.position), min(end, image.end)
                if low < high:
                    cached = self._cached[image.digest]
                    part = np.arange(low, high)
                    if self._encoder.spec.breaks_rows:
                        part, cached = self._without_breaks(image, part, cached)
                    else:
                        cached = cached[low - image.position : high - image.position]
                    tokens.append(first + part)
                    embeddings.append(cached)
                    shown.append((image, slot, first))
        if not tokens:
            return None
        joined, whole = torch.cat(embeddings), None
        if self._model.image_attention is not None:
            whole = self._whole(shown, tokens, table)
        return ImageTokens(to_device(np.concatenate(tokens), joined.device), joined, whole)

    def _without_breaks(
        self, image: SlotImage, part: IntArray, cached: Tensor
    ) -> tuple[IntArray, Tensor]:
        """Return the positions of a part that are not between rows, and their embeddings."""
        _, width = self._grid(image)
        rows, columns = np.divmod(part - image.position, width + 1)
        is_shown = columns < width
        indices = (rows * width + columns)[is_shown]
        return part[is_shown], cached.index_select(0, to_device(indices, cached.device))

    def _whole(
        self,
        shown: list[tuple[SlotImage, int, int]],
        tokens: list[IntArray],
        table: SlotTable,
    ) -> WholeImages:
        """Return how tokens attend to all of their image.

        An image's first tokens may have been computed in an earlier step; substituting others in
        their place does not change the bits of the rest.

        Args:
            shown: the images, their sequences' slots, and where the first token would be.
            tokens: of each image, up to its last.
        """
        slots = np.array([slot for _, slot, _ in shown])
        counts = np.array([image.num_tokens for image, _, _ in shown])
        firsts = np.cumsum(counts) - counts
        rows = AttentionRows(
            starts=np.array([image.position for image, _, _ in shown]),
            counts=counts,
            first_token=firsts,
            block_tables=table.block_tables[slots],
            block_size=table.block_size,
            other_tables=tuple(tables[slots] for tables in table.other_tables),
        )
        queries = [
            np.maximum(first + np.arange(image.position, image.end), own[0])
            for (image, _, first), own in zip(shown, tokens, strict=True)
        ]
        computed = [
            end - len(own) + np.arange(len(own))
            for end, own in zip((firsts + counts).tolist(), tokens, strict=True)
        ]
        queried, own = (
            to_device(np.concatenate(each), self._model.device) for each in (queries, computed)
        )
        return whole_images(self._model, rows, queried, own)
