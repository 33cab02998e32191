"""From the plays' text to a tokenizer and to documents to learn from."""

import dataclasses
import random
import re
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .chat_format import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START

# System messages that say nothing about the part to play, so that the usual ones do no harm.
GENERAL_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a character in a play by Shakespeare.",
    "Answer in the manner of Shakespeare.",
    "Play your part.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Speech:
    """What one character says in one go."""

    speaker: str
    words: str

    def __str__(self) -> str:
        return f"{self.speaker}:\n{self.words}"


def split_speeches(text: str) -> list[Speech]:
    """Cut a play's text into speeches; blank lines inside a speech stay inside it."""
    heading = re.compile(r"^([A-Z][^:\n]{0,40}):(?:\n|$)")
    speeches: list[Speech] = []
    for block in re.split(r"\n{2,}", text.strip()):
        found = heading.match(block)
        if found:
            speeches.append(Speech(found[1], block[found.end() :]))
        elif speeches:
            last = speeches[-1]
            speeches[-1] = Speech(last.speaker, f"{last.words}\n\n{block}".strip())
    return [speech for speech in speeches if speech.words]


def split_text(text: str) -> tuple[str, str]:
    """Return the text to learn from and the last 5 %, cut between two speeches."""
    cut = text.index("\n\n", int(len(text) * 0.95))
    return text[:cut].strip(), text[cut:].strip()


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer, which can represent any text, learnt from ``text``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def plain_documents(speeches: list[Speech], rng: random.Random) -> Iterator[str]:
    """Yield the speeches in order, in scenes of random length."""
    start = 0
    while start < len(speeches):
        end = start + rng.randint(20, 100)
        yield "\n\n".join(map(str, speeches[start:end])) + END_OF_TEXT
        start = end


def chat_documents(speeches: list[Speech], rng: random.Random) -> Iterator[str]:
    """Yield dialogues: one speech is the user's turn and the next one the answer."""
    start = rng.randint(0, 1)
    while start + 1 < len(speeches):
        part = speeches[start : start + 2 * rng.choice((1, 1, 1, 2, 2, 3, 4))]
        part = part[: len(part) // 2 * 2]
        start += len(part)
        turns = [
            (("user", "assistant")[index % 2], speech.words) for index, speech in enumerate(part)
        ]
        speakers = {speech.speaker for speech in part[1::2]}
        draw = rng.random()
        if draw < 0.35 and len(speakers) == 1:
            name = speakers.pop()
            turns.insert(0, ("system", f"You are {rng.choice((name, name.title()))}."))
        elif draw > 0.85:
            turns.insert(0, ("system", rng.choice(GENERAL_SYSTEM_MESSAGES)))
        body = "".join(f"{TURN_START}{role}\n{words}{TURN_END}\n" for role, words in turns)
        yield body + END_OF_TEXT
