"""Images as vLLM's engine core takes them: prepared by vLLM's own processor of the model."""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from engine.shared.messages import AddRequest, EncoderInput
from engine.vllm.requests import NotOffered

_PATIENCE = 0.05
"""Seconds that an engine which has nothing else to compute waits for an image."""


class ImagePreparation:
    """Prepares the images of requests in a thread beside the steps.

    Each is prepared once: vLLM's cache has it by its digest, which also tells images apart in
    vLLM's encoder cache and in the hashes of its prefix cache.

    Args:
        config: vLLM's.
    """

    def __init__(self, config: Any) -> None:
        self._budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
        self.takes_images: bool = self._budget.mm_limits.get("image", 0) > 0
        """Whether the model does, and --limit-mm-per-prompt allows any."""
        self._thread = ThreadPoolExecutor(1, "images")
        self._under_way: dict[int, Future[Any]] = {}
        self._prompt: list[int] = []
        """Tokens of a prompt of one image."""
        if self.takes_images:
            inputs = self._budget.processor.get_dummy_inputs(
                config.model_config.max_model_len, {"image": 1}, {}
            )
            self._prompt = inputs.prompt

    @property
    def is_busy(self) -> bool:
        """Whether there are requests that `done` has not returned."""
        return bool(self._under_way)

    def begin(self, message: AddRequest, request: Any) -> None:
        """Prepare the images of a message for its `EngineCoreRequest`; `done` has it afterwards."""
        self._under_way[message.id] = self._thread.submit(self._shown, message, request)

    def forget(self, request_id: int) -> None:
        """Drop a request, if it is under way."""
        if (future := self._under_way.pop(request_id, None)) is not None:
            future.cancel()

    def done(self, *, idle: bool) -> list[tuple[int, "Future[Any]"]]:
        """Return the ids of requests that are prepared, each with vLLM's or with what went wrong.

        Args:
            idle: nothing else is to be computed: wait a little for one.
        """
        ended = wait(self._under_way.values(), _PATIENCE if idle else 0, FIRST_COMPLETED).done
        found = [(each, future) for each, future in self._under_way.items() if future in ended]
        for request_id, _ in found:
            del self._under_way[request_id]
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _shown(self, message: AddRequest, request: Any) -> Any:
        found, before = [], 0
        for image in message.encoder_inputs:
            if image.position < before:
                raise ValueError("an image begins before the end of what is before it")
            found.append(self._feature(image, message.prompt_token_ids))
            before = image.position + image.num_tokens
        request.mm_features = found
        return request

    def _feature(self, image: EncoderInput, prompt: list[int]) -> Any:
        size = image.width, image.height
        if len(image.pixels) != 3 * image.width * image.height:
            raise ValueError(f"{len(image.pixels)} bytes are not those of {size} pixels")
        processor, digest = self._budget.processor, image.digest.hex()
        shown = Image.frombytes("RGB", size, image.pixels)
        made = processor(
            list(self._prompt),
            processor.info.parse_mm_data({"image": [shown]}),
            mm_uuid_items={"image": [digest]},
            cache=self._budget.cache,
        )
        [place] = made["mm_placeholders"]["image"]
        shows = place.is_embed
        if shows is None:
            shows = torch.ones(place.length, dtype=torch.bool)
        at = shows.nonzero().flatten().tolist()
        first, end = at[0], at[-1] + 1
        # Front ends count an image before it is here: they write what vLLM would.
        wanted = made["prompt_token_ids"][place.offset + first : place.offset + end]
        written = prompt[image.position : image.position + image.num_tokens]
        if wanted != written:
            raise NotOffered(
                "messages",
                f"to vLLM's processor an image of {image.width} x {image.height} pixels is "
                f"{len(wanted)} tokens, which are not the {len(written)} of the prompt",
            )
        if len(at) > self._budget.encoder_cache_size:
            raise NotOffered(
                "messages",
                f"an image of {len(at)} tokens is larger than vLLM's encoder cache of "
                f"{self._budget.encoder_cache_size}: raise --max-num-batched-tokens",
            )
        return MultiModalFeatureSpec(
            data=made["mm_kwargs"]["image"][0],
            modality="image",
            identifier=digest,
            mm_position=PlaceholderRange(image.position, end - first, shows[first:end]),
            mm_hash=made["mm_hashes"]["image"][0],
        )
