"""Prompts for a chat model: questions about many things, and documentation to be put in words.

The questions of `benchmarks.speculation_bench` are about other things: they stay unseen.
"""

import importlib
import inspect
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from tokenizers import Tokenizer

_LONGEST_DOCUMENTATION = 500
"""In characters; longer ones are left out."""
_SHORTEST_DOCUMENTATION = 80

_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
"""What the chat template of SmolLM2 puts before a conversation that has none of its own."""
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

_THINGS = (
    "volcanoes", "the moon", "honey bees", "glaciers", "bicycles", "the printing press", "bread",
    "chess", "the human heart", "rivers", "elephants", "coffee", "democracy", "gravity",
    "earthquakes", "batteries", "the Roman Empire", "jazz", "vaccines", "maps", "owls", "sleep",
    "money", "bridges", "rice", "computers", "libraries", "storms", "mathematics", "deserts",
    "tea", "trains", "the violin", "magnets", "soccer", "memory", "rain forests", "glass",
    "clocks", "the Internet", "dinosaurs", "paper", "salt", "wind power", "penguins", "cheese",
    "telescopes", "languages", "mountains", "antibiotics", "gardening", "robots", "swimming",
    "the stock market", "planets", "friendship", "tomatoes", "horses", "cotton", "lightning",
)  # fmt: skip
_QUESTIONS = (
    "What are {}?",
    "Explain why {} matter to people.",
    "Write a short poem about {}.",
    "Give me five facts about {}.",
    "Write a paragraph about the history of {}.",
    "Tell a story in which {} play a part.",
    "How would you explain {} to a child?",
    "List three good books or films about {} and say why.",
    "What are common mistakes when people talk about {}?",
    "Write an email to a friend about {}.",
    "Make a plan for a lesson about {}.",
    "Compare {} with something similar.",
    "What will {} be like in a hundred years?",
    "Write a dialogue between two people who disagree about {}.",
    "Summarize what is known about {} in three sentences.",
)
_MODULES = (
    "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "collections",
    "configparser", "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "email.message",
    "fnmatch", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "http.client",
    "http.cookies", "inspect", "io", "ipaddress", "itertools", "json", "linecache", "locale",
    "logging", "mailbox", "math", "mimetypes", "operator", "os", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "sched", "secrets", "selectors", "shelve", "shlex",
    "shutil", "signal", "socket", "sqlite3", "ssl", "statistics", "string", "struct", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "trace",
    "traceback", "types", "typing", "unittest", "urllib.parse", "urllib.request", "uuid",
    "warnings", "wave", "weakref", "xml.dom.minidom", "zipfile",
)  # fmt: skip
_TASKS = (
    "Explain in plain words what {name} does.\n\n{text}",
    "Write an example in Python that uses {name}.\n\n{text}",
    "Rewrite this documentation for beginners:\n\n{text}",
    "When would you use {name}? This is its documentation:\n\n{text}",
)


class Prompt(NamedTuple):
    """What the model is asked."""

    token_ids: list[int]
    temperature: float
    seed: int


def prompts(tokenizer: Tokenizer, seed: int) -> Iterator[Prompt]:
    """Yield prompts in random order, every second one to be answered greedily, without an end."""
    source = random.Random(seed)
    questions = [form.format(thing) for form, thing in itertools.product(_QUESTIONS, _THINGS)]
    documents = list(_documents())
    source.shuffle(questions)
    for number in itertools.count():
        if number % 3 == 2:
            name, text = source.choice(documents)
            asked = source.choice(_TASKS).format(name=name, text=text)
        else:
            asked = questions[(number - number // 3) % len(questions)]
        said = _TURN.format(asked)
        if source.random() < 0.5:
            said = _SYSTEM + said
        yield Prompt(tokenizer.encode(said).ids, float(source.random() < 0.5), seed + number)


def _documents() -> Iterator[tuple[str, str]]:
    """Yield names of Python's standard library and what its documentation strings say of them."""
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items(), key=lambda item: item[0]):
            if name.startswith("_") or getattr(member, "__module__", None) != module_name:
                continue
            text = inspect.getdoc(member) or ""
            if _SHORTEST_DOCUMENTATION <= len(text) <= _LONGEST_DOCUMENTATION:
                yield f"{module_name}.{name}", text
