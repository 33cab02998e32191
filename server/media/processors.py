"""Image processors by model type: sizes, tiles and placeholder text.

Token counts and sizes depend only on the dimensions of an image, so both are known before it is
decoded. Pillow resizes uint8 pixels, as the models' authors did; engines rescale and normalize.
Video and audio would get their own protocols next to `ImageProcessor`, with plans of the same form:
placeholder text, and the encoder input of each run of tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from PIL import Image

from engine.shared.messages import WHOLE_PATCHES


class BadProcessor(ValueError):
    """The image processor configuration of a model is invalid or unsupported."""


class EncoderSize(NamedTuple):
    """Size of one encoder input in pixels, and its number of tokens."""

    height: int
    width: int
    num_tokens: int


class ImagePlan(NamedTuple):
    """The shape of a prepared image."""

    text: str
    """Placeholder text in the prompt."""
    sizes: tuple[EncoderSize, ...]
    """Encoder inputs in the order of their tokens."""
    rows: int = 1
    """Number of equal runs that the tokens of an encoder input form, with other text between."""

    @property
    def num_tokens(self) -> int:
        """Number of image embeddings, one per placeholder token."""
        return sum(size.num_tokens for size in self.sizes)

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of placeholder tokens."""
        return tuple(size.num_tokens // self.rows for size in self.sizes for _ in range(self.rows))

    @property
    def num_bytes(self) -> int:
        """Size of all encoder inputs in bytes, as uint8 RGB."""
        return sum(3 * size.height * size.width for size in self.sizes)


class ImageProcessor(Protocol):
    """Image preprocessing of one model type."""

    marker: str
    """Text that the chat template emits for an image."""
    token: str
    """Placeholder token that is replaced by one embedding."""
    name: str
    """Identifies the processor and all settings that affect pixels."""

    def plan(self, height: int, width: int) -> ImagePlan:
        """Return the plan for an image of this size, whose aspect ratio is at most 200."""
        ...

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        """Yield the encoder inputs of an RGB image, in the sizes of its plan."""
        ...


class Idefics3:
    """Idefics3 and SmolVLM: tiles in row-major order, then the whole image resized to one tile."""

    marker = token = "<image>"
    _LONGEST = 4096

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._edge = int(settings.get("size", {"longest_edge": 1456})["longest_edge"])
        self._tile = int(settings.get("max_image_size", {"longest_edge": 364})["longest_edge"])
        self._splits = settings.get("do_image_splitting", True)
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.LANCZOS))
        self._num_tokens = int(settings.get("image_seq_len") or self._of_network(config))
        self.name = f"idefics3 {self._edge} {self._tile} {self._splits} {self._resample}"

    @staticmethod
    def _of_network(config: Mapping[str, Any]) -> int:
        vision = config["vision_config"]
        patches = int(vision["image_size"]) // int(vision["patch_size"])
        return patches**2 // int(config.get("scale_factor", 2)) ** 2

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) with the configured longer side; the shorter side is even."""
        ratio = width / height
        if width >= height:
            width, height = self._edge, int(self._edge / ratio)
            height += height % 2
        else:
            height, width = self._edge, int(self._edge * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > self._LONGEST:
            width, height = self._LONGEST, int(self._LONGEST / ratio)
        elif height > width and height > self._LONGEST:
            height, width = self._LONGEST, int(self._LONGEST * ratio)
        return max(height, 1), max(width, 1)

    def _tiled(self, height: int, width: int) -> tuple[int, int]:
        """Round (height, width) up to whole tiles."""
        tile, ratio = self._tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return height, width

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles; (0, 0) if the image is not split."""
        if not self._splits:
            return 0, 0
        height, width = self._tiled(*self._resized(height, width))
        rows, columns = height // self._tile, width // self._tile
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def plan(self, height: int, width: int) -> ImagePlan:
        rows, columns = self._grid(height, width)
        images = self.token * self._num_tokens
        lines = [
            "".join(
                f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{images}"
                for column in range(columns)
            )
            for row in range(rows)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text += f"<fake_token_around_image><global-img>{images}<fake_token_around_image>"
        size = EncoderSize(self._tile, self._tile, self._num_tokens)
        return ImagePlan(text, (size,) * (rows * columns + 1))

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        tile = self._tile
        height, width = self._resized(image.height, image.width)
        image = image.resize((width, height), self._resample)
        if not self._splits:
            yield image.resize((tile, tile), self._resample)
            return
        height, width = self._tiled(height, width)
        image = image.resize((width, height), self._resample)
        if height == width == tile:
            yield image
            return
        for top in range(0, height, tile):
            for left in range(0, width, tile):
                yield image.crop((left, top, left + tile, top + tile))
        yield image.resize((tile, tile), self._resample)


class Gemma3:
    """Gemma 3: every image is resized to one fixed size."""

    marker, token = "<start_of_image>", "<image_soft_token>"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        if settings.get("do_pan_and_scan"):
            raise BadProcessor("do_pan_and_scan is not served")
        size = settings.get("size", {"height": 224, "width": 224})
        self._height, self._width = int(size["height"]), int(size["width"])
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BILINEAR))
        tokens = settings.get("image_seq_length") or config.get("mm_tokens_per_image") or 256
        self._plan = ImagePlan(
            f"\n\n{self.marker}{self.token * int(tokens)}<end_of_image>\n\n",
            (EncoderSize(self._height, self._width, int(tokens)),),
        )
        self.name = f"gemma3 {self._height} {self._width} {self._resample}"

    def plan(self, height: int, width: int) -> ImagePlan:
        return self._plan

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        yield image.resize((self._width, self._height), self._resample)


class Qwen2VL:
    """Qwen2-VL and successors: native size, rounded to whole merged patches within pixel limits."""

    marker = token = "<|image_pad|>"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        size = settings.get("size") or {}
        self._min = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        self._max = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        self._factor = int(settings.get("patch_size", 14)) * int(settings.get("merge_size", 2))
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        self.name = f"qwen2_vl {self._min} {self._max} {self._factor} {self._resample}"

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        factor, area = self._factor, height * width
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self._max:
            scale = math.sqrt(area / self._max)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif new_height * new_width < self._min:
            scale = math.sqrt(self._min / area)
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width

    def plan(self, height: int, width: int) -> ImagePlan:
        height, width = self._resized(height, width)
        tokens = (height // self._factor) * (width // self._factor)
        return ImagePlan(self.token * tokens, (EncoderSize(height, width, tokens),))

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        height, width = self._resized(image.height, image.width)
        yield image.resize((width, height), self._resample)


class Pixtral:
    """Mistral 3, and LLaVA with the encoder of Pixtral: rows of patches, with text between."""

    marker = token = "[IMG]"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        vision = config["vision_config"]
        size = settings.get("size") or {}
        self._longest = int(size.get("longest_edge") or vision.get("image_size", 1540))
        is_merged = config["model_type"] == "mistral3"
        merged = int(config.get("spatial_merge_size", 2)) if is_merged else 1
        self._factor = merged * int(vision.get("patch_size", 14 if is_merged else 16))
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        self.name = f"pixtral {self._longest} {self._factor} {self._resample}"

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(1.0, height / self._longest, width / self._longest)
        rows, columns = (
            max(0, math.floor(side / ratio) - 1) // self._factor + 1 for side in (height, width)
        )
        return rows, columns

    def plan(self, height: int, width: int) -> ImagePlan:
        rows, columns = self._grid(height, width)
        text = "[IMG_BREAK]".join([self.token * columns] * rows) + "[IMG_END]"
        size = EncoderSize(rows * self._factor, columns * self._factor, rows * columns)
        return ImagePlan(text, (size,), rows)

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        rows, columns = self._grid(image.height, image.width)
        yield image.resize((columns * self._factor, rows * self._factor), self._resample)


class Llava:
    """LLaVA with CLIP or SigLIP: one square of fixed size."""

    marker = token = "<image>"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        vision = config["vision_config"]
        kind = vision.get("model_type", "clip_vision_model")
        strategy = config.get("vision_feature_select_strategy") or "default"
        if WHOLE_PATCHES.get(kind) != strategy:
            raise BadProcessor(
                f"a LLaVA with vision_feature_select_strategy {strategy!r} and a vision_config of "
                f"model_type {kind!r} is not served"
            )
        if settings.get("do_pad"):
            raise BadProcessor("do_pad is not served")
        self._side = int(vision.get("image_size", 336))
        square = {"height": self._side, "width": self._side}
        size = settings.get("size", {"shortest_edge": self._side})
        size = size if isinstance(size, dict) else {"shortest_edge": size}
        self._shortest: int | None = size.get("shortest_edge")
        crop = settings.get("crop_size", square)
        crop = crop if isinstance(crop, dict) else {"height": crop, "width": crop}
        is_cut = self._shortest is not None and settings.get("do_center_crop", True)
        if (crop if is_cut else size) != square or (self._shortest or self._side) < self._side:
            raise BadProcessor(f"size and crop_size do not produce images of {self._side} pixels")
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        tokens = (self._side // int(vision.get("patch_size", 14))) ** 2
        size_of_all = EncoderSize(self._side, self._side, tokens)
        self._plan = ImagePlan(self.token * tokens, (size_of_all,))
        self.name = f"llava {self._side} {self._shortest} {self._resample}"

    def plan(self, height: int, width: int) -> ImagePlan:
        return self._plan

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        side = self._side
        if self._shortest is None:
            yield image.resize((side, side), self._resample)
            return
        least = min(image.size)
        width, height = (int(self._shortest * each / least) for each in image.size)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.resize((width, height), self._resample)
        yield image.crop((left, top, left + side, top + side))


class InternVL:
    """InternVL: tiles of the grid closest to the image's shape, then the whole as one tile."""

    marker = token = "<IMG_CONTEXT>"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        side = config["vision_config"].get("image_size", 448)
        self._side = int(side[0] if isinstance(side, list) else side)
        square = {"height": self._side, "width": self._side}
        if settings.get("size", square) != square:
            raise BadProcessor(f"size is not that of the encoder's images, {self._side} pixels")
        # transformers' processor of this model splits images unless the request says otherwise.
        min_tiles = int(settings.get("min_patches", 1))
        max_tiles = int(settings.get("max_patches", 12))
        sides = range(1, max_tiles + 1)
        grids = [(rows, columns) for columns in sides for rows in sides]
        allowed = [grid for grid in grids if min_tiles <= math.prod(grid) <= max_tiles]
        self._grids = sorted(allowed, key=math.prod)
        self._resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        tokens = settings.get("image_seq_length") or config.get("image_seq_length") or 256
        self._num_tokens = int(tokens)
        self.name = f"internvl {self._side} {min_tiles} {max_tiles} {self._resample}"

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        best, least = (1, 1), math.inf
        for rows, columns in self._grids:
            difference = abs(width / height - columns / rows)
            # Of equally close grids the larger, up to twice the area of the image.
            is_filled = height * width > 0.5 * self._side**2 * rows * columns
            if difference < least or (difference == least and is_filled):
                best, least = (rows, columns), difference
        return best

    def plan(self, height: int, width: int) -> ImagePlan:
        tiles = math.prod(self._grid(height, width))
        tiles += tiles > 1
        size = EncoderSize(self._side, self._side, self._num_tokens)
        text = f"<img>{self.token * self._num_tokens * tiles}</img>"
        return ImagePlan(text, (size,) * tiles)

    def pixels(self, image: Image.Image) -> Iterator[Image.Image]:
        side, (rows, columns) = self._side, self._grid(image.height, image.width)
        large = image.resize((columns * side, rows * side), self._resample)
        for top in range(0, rows * side, side):
            for left in range(0, columns * side, side):
                yield large.crop((left, top, left + side, top + side))
        if rows * columns > 1:
            yield image.resize((side, side), self._resample)


def _llava(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Llava | Pixtral:
    is_pixtral = config["vision_config"].get("model_type") == "pixtral"
    return (Pixtral if is_pixtral else Llava)(settings, config)


_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageProcessor]] = {
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "gemma3": Gemma3,
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen2VL,
    "qwen3_vl": Qwen2VL,
    "qwen3_vl_moe": Qwen2VL,
    "qwen3_5": Qwen2VL,
    "qwen3_5_moe": Qwen2VL,
    "mistral3": Pixtral,
    "llava": _llava,
    "internvl": InternVL,
}
"""Processors by the `model_type` of config.json."""


def image_processor(directory: Path) -> ImageProcessor | None:
    """Return the image processor of the model in a directory, None if images are not supported.

    Raises:
        BadProcessor: the configuration is unreadable, incomplete or unsupported.
    """
    config = _read(directory / "config.json")
    kind = _KINDS.get(str(config.get("model_type")))
    if kind is None or not isinstance(config.get("vision_config"), dict):
        return None
    settings = _read(directory / "processor_config.json")
    settings |= settings.pop("image_processor", None) or {}
    settings |= _read(directory / "preprocessor_config.json")
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings.get("do_resize") is False:
        raise BadProcessor("do_resize is false: images of any size are not served")
    try:
        return kind(settings, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadProcessor(
            f"how {directory.name} takes images cannot be read from preprocessor_config.json: "
            f"{type(error).__name__} {error}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise BadProcessor(f"{path} cannot be read: {error}") from error
