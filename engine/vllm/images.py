"""Preparation of images for vLLM's engine core, by vLLM's own processor for the model."""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from engine.shared.messages import AddRequest, EncoderInput
from engine.vllm.requests import UnsupportedParameter

_MAX_WAIT = 0.05
"""Seconds that an otherwise idle engine waits for an image."""


class ImagePreparation:
    """Prepares the images of requests in a background thread while steps run.

    vLLM caches prepared images by digest. The digest also identifies images in vLLM's encoder
    cache and in the block hashes of its prefix cache.

    Args:
        config: vLLM's configuration (`VllmConfig`).
    """

    def __init__(self, config: Any) -> None:
        self._budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
        self.takes_images: bool = self._budget.mm_limits.get("image", 0) > 0
        """Whether the model supports images and --limit-mm-per-prompt allows at least one."""
        self._thread = ThreadPoolExecutor(1, "images")
        self._pending: dict[int, Future[Any]] = {}
        self._prompt: list[int] = []
        """vLLM's dummy prompt with one image, as input for its processor."""
        if self.takes_images:
            inputs = self._budget.processor.get_dummy_inputs(
                config.model_config.max_model_len, {"image": 1}, {}
            )
            self._prompt = inputs.prompt

    @property
    def is_busy(self) -> bool:
        """Whether any requests have not been returned by `done` yet."""
        return bool(self._pending)

    def start(self, message: AddRequest, request: Any) -> None:
        """Start preparing the images of a message; `done` returns its `EngineCoreRequest`."""
        self._pending[message.id] = self._thread.submit(self._prepare, message, request)

    def forget(self, request_id: int) -> None:
        """Cancel the preparation of a request; idempotent."""
        if (future := self._pending.pop(request_id, None)) is not None:
            future.cancel()

    def done(self, *, idle: bool) -> list[tuple[int, "Future[Any]"]]:
        """Return finished requests: ids, each with a future of the `EngineCoreRequest` or an error.

        Args:
            idle: the engine has nothing else to compute, so wait briefly for the first one.
        """
        completed = wait(self._pending.values(), _MAX_WAIT if idle else 0, FIRST_COMPLETED).done
        finished = [(each, future) for each, future in self._pending.items() if future in completed]
        for request_id, _ in finished:
            del self._pending[request_id]
        return finished

    def close(self) -> None:
        """Stop the thread after the image it is preparing."""
        self._thread.shutdown(cancel_futures=True)

    def _prepare(self, message: AddRequest, request: Any) -> Any:
        features, previous_end = [], 0
        for image in message.encoder_inputs:
            if image.position < previous_end:
                raise ValueError("an image begins before the end of the previous one")
            features.append(self._prepare_image(image, message.prompt_token_ids))
            previous_end = image.position + image.num_tokens
        request.mm_features = features
        return request

    def _prepare_image(self, image: EncoderInput, prompt: list[int]) -> Any:
        size = image.width, image.height
        if len(image.pixels) != 3 * image.width * image.height:
            raise ValueError(f"an image of {size} pixels has {len(image.pixels)} bytes")
        processor, digest = self._budget.processor, image.digest.hex()
        picture = Image.frombytes("RGB", size, image.pixels)
        processed = processor(
            list(self._prompt),
            processor.info.parse_mm_data({"image": [picture]}),
            mm_uuid_items={"image": [digest]},
            cache=self._budget.cache,
        )
        [placeholder] = processed["mm_placeholders"]["image"]
        is_embedding = placeholder.is_embed
        if is_embedding is None:
            is_embedding = torch.ones(placeholder.length, dtype=torch.bool)
        positions = is_embedding.nonzero().flatten().tolist()
        first, end = positions[0], positions[-1] + 1
        # The front end has already expanded the placeholders; they must match vLLM's.
        expected = processed["prompt_token_ids"][
            placeholder.offset + first : placeholder.offset + end
        ]
        actual = prompt[image.position : image.position + image.num_tokens]
        if expected != actual:
            raise UnsupportedParameter(
                "messages",
                f"vLLM's processor expands an image of {image.width} x {image.height} pixels to "
                f"{len(expected)} tokens, the prompt has {len(actual)}",
            )
        if len(positions) > self._budget.encoder_cache_size:
            raise UnsupportedParameter(
                "messages",
                f"an image of {len(positions)} tokens is larger than vLLM's encoder cache of "
                f"{self._budget.encoder_cache_size}: raise --max-num-batched-tokens",
            )
        return MultiModalFeatureSpec(
            data=processed["mm_kwargs"]["image"][0],
            modality="image",
            identifier=digest,
            mm_position=PlaceholderRange(image.position, end - first, is_embedding[first:end]),
            mm_hash=processed["mm_hashes"]["image"][0],
        )
