"""One model replaces another under load, each with engines and front ends of its own group."""

import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.support.commands import coordinator, swell
from tests.support.http import call
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

NAME = "chat"
PROMPTS = ["Act", "What light", "Good morrow", "Enter the king"]
WIDTH, HIDDEN, LAYERS = 64, 128, 2


def save_small_llama(directory: Path, seed: int) -> None:
    """Write a Llama of random weights, with a tokenizer file of its own."""
    vocabulary = json.loads((BUNDLED_MODEL / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.3 * torch.randn(rows, columns, generator=generator)

    weights = {
        "model.embed_tokens.weight": random_matrix(vocabulary, WIDTH),
        "lm_head.weight": random_matrix(vocabulary, WIDTH),
        "model.norm.weight": torch.ones(WIDTH),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(WIDTH)
        for each in "qkvo":
            weights[f"{prefix}.self_attn.{each}_proj.weight"] = random_matrix(WIDTH, WIDTH)
        for name, shape in (
            ("gate", (HIDDEN, WIDTH)),
            ("up", (HIDDEN, WIDTH)),
            ("down", (WIDTH, HIDDEN)),
        ):
            weights[f"{prefix}.mlp.{name}_proj.weight"] = random_matrix(*shape)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
        "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    for path in BUNDLED_MODEL.glob("*token*.json"):
        shutil.copy(path, directory)
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")


def ask(url: str, prompt: str) -> str:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return str(call(f"{url}/v1/completions", body)["choices"][0]["text"])


class Service:
    """What stands before front ends: it picks one of those that are ready, as kube-proxy does."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._chosen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, url: str) -> None:
        self.urls = [*self.urls, url]

    def remove(self, url: str) -> None:
        """Choose one no more, and give those who have chosen it time to ask, as `preStop` does."""
        with self._lock:
            self.urls = [each for each in self.urls if each != url]
        until(lambda: not self._chosen[url], "who has chosen it is answered")

    @contextmanager
    def choose(self, chance: random.Random) -> Iterator[str]:
        """Choose one for a request, which is answered within."""
        with self._lock:
            url = chance.choice(self.urls)
            self._chosen[url] += 1
        try:
            yield url
        finally:
            with self._lock:
                self._chosen[url] -= 1

    @contextmanager
    def load(self, expected: dict[str, dict[str, str]], clients: int) -> Iterator[Counter[str]]:
        """Have clients ask all the while; counts right answers by URL."""
        right: Counter[str] = Counter()
        faults: list[str] = []
        stop = threading.Event()

        def client(seed: int) -> None:
            chance = random.Random(seed)
            while not stop.is_set():
                with self.choose(chance) as url:
                    prompt = chance.choice(PROMPTS)
                    try:
                        text = ask(url, prompt)
                    except Exception as error:
                        faults.append(f"{url}: {error}")
                        continue
                if text != expected[url][prompt]:
                    faults.append(f"{url}: {prompt!r} was answered with {text!r}")
                right[url] += 1

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield right
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert faults == []


def test_model_replacement_gives_only_correct_answers(tmp_path: Path) -> None:
    second = tmp_path / "second"
    save_small_llama(second, seed=3)

    def engine(model: Path, group: str) -> ExitStack:
        flags = ("--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", str(2**26))
        stack = ExitStack()
        stack.enter_context(
            swell("engine", str(model), *join, "--engine-group", group, "--batch-invariant", *flags)
        )
        return stack

    def front_end(model: Path, group: str, *flags: str) -> RunningStack:
        named = ("--served-model-name", NAME, "--api-server-count", "2", "--engine-group", group)
        return RunningStack(str(model), *join, *named, *flags, command="api-server")

    service = Service()
    expected: dict[str, dict[str, str]] = {}
    with ExitStack() as running:
        join = running.enter_context(coordinator(tmp_path))
        old_engine = running.enter_context(engine(BUNDLED_MODEL, "first"))
        old = running.enter_context(ExitStack())
        old_url = old.enter_context(front_end(BUNDLED_MODEL, "first")).url
        expected[old_url] = {prompt: ask(old_url, prompt) for prompt in PROMPTS}
        service.add(old_url)
        with service.load(expected, clients=4) as right:
            until(lambda: right[old_url] > 10, "the first model answers")
            began = time.monotonic()
            for _ in range(2):
                running.enter_context(engine(second, "second"))
            new = front_end(second, "second", "--min-ready-engines", "2")
            new_url = running.enter_context(new).url
            able = time.monotonic() - began
            expected[new_url] = {prompt: ask(new_url, prompt) for prompt in PROMPTS}
            assert expected[new_url] != expected[old_url]
            service.add(new_url)
            before = right[old_url]
            until(lambda: right[new_url] > 20 and right[old_url] > before + 10, "both answer")
            began = time.monotonic()
            service.remove(old_url)
            old.close()
            old_engine.close()
            ended = time.monotonic() - began
            after = right[new_url]
            until(lambda: right[new_url] > after + 20, "the second model answers alone")
    print(
        f"{right[old_url]} and {right[new_url]} answers, all right; the new model was ready after "
        f"{able:.1f} s, the old one's processes had ended after {ended:.1f} s"
    )
