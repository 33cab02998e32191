"""Keeps answers with their states in files, so that writing and training can be done apart."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.draft_head.answers import Answered

_PER_FILE = 32
"""Answers in one file."""


def save_answers(answers: Iterable[Answered], directory: Path) -> None:
    """Write files as answers come; states are kept in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    kept: list[Answered] = []
    number = 0
    for answered in answers:
        kept.append(answered)
        if len(kept) == _PER_FILE:
            _save(kept, directory / f"answers-{number:04d}.safetensors")
            number += 1
            kept = []
    if kept:
        _save(kept, directory / f"answers-{number:04d}.safetensors")


def _save(answers: list[Answered], path: Path) -> None:
    tensors = {
        "lengths": torch.tensor([len(each.token_ids) for each in answers]),
        "num_prompt_tokens": torch.tensor([each.num_prompt_tokens for each in answers]),
        "token_ids": torch.cat([each.token_ids for each in answers]),
        "tapped": torch.cat([each.tapped for each in answers]).bfloat16(),
        "final": torch.cat([each.final for each in answers]).bfloat16(),
    }
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    unfinished.rename(path)


def load_answers(directory: Path) -> Iterator[Answered]:
    """Yield what was saved, in order; tensors of states are views of mapped files."""
    for path in sorted(directory.glob("answers-*.safetensors")):
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        computed = [length - 1 for length in lengths]
        for token_ids, tapped, final, prompt in zip(
            torch.split(tensors["token_ids"], lengths),
            torch.split(tensors["tapped"], computed),
            torch.split(tensors["final"], computed),
            tensors["num_prompt_tokens"].tolist(),
            strict=True,
        ):
            yield Answered(token_ids, tapped, final, prompt)
