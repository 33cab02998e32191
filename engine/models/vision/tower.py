"""Vision encoders and projectors that transformers computes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.formats.files import CheckpointError, abbreviated
from engine.models.formats.pretrained import read_pretrained
from engine.models.module import Module
from engine.models.spec import TowerSpec, UnsupportedModel
from engine.models.vision.pixels import CLIP, Normalization, PixelReader, read_normalization
from engine.shared.config import ModelConfig


class TransformersTower(Module, finds_hooks=True):
    """The vision encoder of a model of transformers, on one device; stateless.

    Each image is encoded separately, so results do not depend on other images.
    """

    def __init__(
        self, spec: TowerSpec, pixels: PixelReader, model: Any, dtype: torch.dtype
    ) -> None:
        """Initialize from a multimodal model of transformers; its text model is not used."""
        super().__init__()
        self.spec = spec
        self.model = model
        self._pixels = pixels
        self._dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: bytes, height: int, width: int) -> Tensor:
        """Return [rows * columns, hidden of the text model] for RGB bytes [height, width, 3]."""
        values = self._pixels.read(pixels, height, width).permute(2, 0, 1).to(self._dtype)
        copies, sizes = 1, {}
        if not self.spec.is_square:
            # transformers cannot split the features of a single token.
            copies = 2 if self.spec.grid(height, width) == (1, 1) else 1
            sizes = {"image_sizes": [[height, width]] * copies}
        features = self.model.get_image_features(
            pixel_values=torch.stack([values] * copies), return_dict=True, **sizes
        )
        embeddings: Tensor = features.pooler_output[0]
        return embeddings


def load_tower(
    directory: Path,
    vision: TowerSpec,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformersTower:
    """Load an encoder, without the layers and the vocabulary of its text model.

    transformers must be installed.

    Raises:
        UnsupportedModel: transformers does not know the model's configuration.
        CheckpointError: the weights do not match the config.
    """
    import transformers

    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        model_class = getattr(transformers, config.architectures[0])
    except Exception as error:  # configuration classes raise arbitrary exceptions
        raise UnsupportedModel(f"transformers cannot read {directory}: {error}") from error
    default = Normalization() if config.vision_config.model_type == "siglip_vision_model" else CLIP
    _leave_out_text(config)
    model = _read(directory, model_class, config, settings, dtype)
    model = model.model.to(device).eval()
    model.language_model = None
    normalization = read_normalization(directory, default)
    return TransformersTower(vision, PixelReader(normalization, device), model, dtype)


def _leave_out_text(config: Any) -> None:
    """Reduce the text model of a configuration of transformers to its width."""
    text = config.text_config
    text.num_hidden_layers, text.vocab_size = 0, 1
    text.bos_token_id = text.eos_token_id = text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # of the text model


def _read(
    directory: Path, model_class: Any, config: Any, settings: ModelConfig, dtype: torch.dtype
) -> Any:
    """Return the model with the weights that it still has, on the CPU.

    Raises:
        CheckpointError: tensors of the encoder are missing, unexpected, or have wrong shapes.
    """
    model, found = read_pretrained(
        directory, model_class, config, settings, dtype, ignore_mismatched_sizes=True
    )
    problems = [
        f"{kind} {name}"
        for kind in ("missing", "mismatched", "unexpected")
        for each in sorted(found.get(f"{kind}_keys", ()), key=str)
        if ".language_model." not in (name := str(each[0] if kind == "mismatched" else each))
        and not name.startswith(("lm_head.", "language_model."))
    ]
    if problems:
        raise CheckpointError(
            f"the weights of the vision encoder in {directory} do not fit the model's config: "
            f"{abbreviated(problems)}; --language-model-only serves the text model"
        )
    return model
