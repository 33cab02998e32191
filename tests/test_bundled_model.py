"""The bundled model is what its card says, loads in transformers, and has learnt something."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

DIRECTORY = Path(__file__).parent.parent / "engine" / "bundled_model"

# From The Tempest, in the part of the text that the model has not learnt from.
PASSAGE = """FERDINAND:
Where should this music be? i' the air or the earth?
It sounds no more: and sure, it waits upon
Some god o' the island. Sitting on a bank,
Weeping again the king my father's wreck,
This music crept by me upon the waters,
Allaying both their fury and my passion
With its sweet air: thence I have follow'd it,
Or it hath drawn me rather. But 'tis gone.
No, it begins again.

FERDINAND:
The ditty does remember my drown'd father.
This is no mortal business, nor no sound
That the earth owes. I hear it now above me.

PROSPERO:
The fringed curtains of thine eye advance
And say what thou seest yond.

MIRANDA:
What is't? a spirit?
Lord, how it looks about! Believe me, sir,
It carries a brave form. But 'tis a spirit.
"""

COMMON_WORDS = """
    a all am and any are art as at be been but by can come could dead death did do dost doth
    duke ere eyes fair father for forth from give go god good grace great had hand hast hath have
    he hear heart heaven her here him his honour how i if in is it king know lady let life like
    live lord love madam make man may me men more most much must my name nay never no nor not now
    o of on one or our own queen say see shall she should sir so son speak stand such sweet tell
    than that the thee their them then there these they thine thing this those thou though thus
    thy time to tongue true unto upon us was we well were what when where which who why will wilt
    with word world would yet you your
"""


def read_json(name: str) -> Any:
    return json.loads((DIRECTORY / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[int, ...]]:
    """The weight file's tensors: shape by name."""
    with safe_open(DIRECTORY / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            assert file.get_slice(name).get_dtype() == "BF16"
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, dict[str, Any]]]:
    """The model in float32, and what transformers says about loading it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    model: Any
    report: dict[str, Any]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
        DIRECTORY, dtype=torch.float32, output_loading_info=True
    )
    yield model.eval(), report
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, dict[str, Any]]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY)


def greedy(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return the likeliest continuation, with its end token if there is one."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def test_directory_is_small_and_holds_only_data() -> None:
    files = sorted(path.name for path in DIRECTORY.iterdir())
    assert files == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum((DIRECTORY / name).stat().st_size for name in files) <= 12_000_000


def test_parameter_counts_equal_those_of_model_card(tensors: dict[str, tuple[int, ...]]) -> None:
    config = read_json("config.json")
    total = sum(math.prod(shape) for shape in tensors.values())
    experts = sum(math.prod(shape) for name, shape in tensors.items() if ".experts." in name)
    active = total - experts * (1 - config["num_experts_per_tok"] / config["num_experts"])
    card = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"([\d,]+) in total, ([\d,]+) active", card)
    assert stated is not None
    assert 4_000_000 <= total <= 6_000_000
    assert [int(number.replace(",", "")) for number in stated.groups()] == [total, active]


def test_weights_have_the_names_of_hub_checkpoints(tensors: dict[str, tuple[int, ...]]) -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["model_type"] == "qwen3_moe"
    assert config["torch_dtype"] == "bfloat16"
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate"]
        parts += [f"self_attn.{part}_proj" for part in "qkvo"]
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
        parts += [
            f"mlp.experts.{expert}.{part}_proj"
            for expert in range(config["num_experts"])
            for part in ("gate", "up", "down")
        ]
        names |= {f"model.layers.{layer}.{part}.weight" for part in parts}
    assert set(tensors) == names


def test_transformers_loads_all_weights_and_no_others(
    loaded: tuple[Any, dict[str, Any]],
) -> None:
    model, report = loaded
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert {key: list(value) for key, value in report.items() if value} == {}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_unseen_text_is_predicted_with_every_expert_in_use(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model(ids, labels=ids, output_router_logits=True)
        logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    assert loss < 4.5
    assert loss < math.log(len(tokenizer)) - 2.5
    for scores in output.router_logits:
        assert set(scores.topk(2).indices.flatten().tolist()) == set(range(8))


def test_predictions_hold_up_at_the_end_of_the_longest_context(model: Any, tokenizer: Any) -> None:
    limit = read_json("config.json")["max_position_embeddings"]
    assert tokenizer.model_max_length == limit
    passage = tokenizer(PASSAGE).input_ids
    before = tokenizer("KATE:\nI know not what to say, my lord.\n\n" * 60).input_ids
    ids = before[: limit - len(passage)] + passage
    assert len(ids) == limit
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    targets = torch.tensor(ids[1:])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    assert losses[-len(passage) :].mean().item() < 4.5


@pytest.mark.parametrize(
    "text",
    [
        PASSAGE,
        "ROMEO:",
        "Hello, world! 42 = 6 * 7\t\r\n  two  spaces ",
        "naïve café — 东京 🎭👩‍👩‍👧 \u0000",
        "",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_special_tokens_are_one_token_each_and_agree_in_all_files(tokenizer: Any) -> None:
    end_of_text, start, end = (
        tokenizer(token).input_ids for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    )
    assert len(tokenizer) == read_json("config.json")["vocab_size"]
    assert (len(end_of_text), len(start), len(end)) == (1, 1, 1)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert sorted(read_json("generation_config.json")["eos_token_id"]) == sorted(end_of_text + end)
    assert read_json("config.json")["eos_token_id"] == end[0]
    assert read_json("tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_chat_template_renders_every_role_and_the_generation_prompt(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "You are ROMEO."},
        {"role": "user", "content": "Who art thou? 🎭"},
        {"role": "assistant", "content": "Thy love."},
        {"role": "user", "content": [{"type": "text", "text": "Whose?"}, {"type": "other"}]},
    ]
    conversation = (
        "<|im_start|>system\nYou are ROMEO.<|im_end|>\n"
        "<|im_start|>user\nWho art thou? 🎭<|im_end|>\n"
        "<|im_start|>assistant\nThy love.<|im_end|>\n"
        "<|im_start|>user\nWhose?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == conversation
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == conversation + "<|im_start|>assistant\n"


def test_romeo_continues_in_words(model: Any, tokenizer: Any) -> None:
    text = greedy(model, tokenizer, "ROMEO:", 100)
    assert text.startswith("\n")
    words = re.sub(r"<\|[a-z_]+\|>", "", text).split()
    assert len(words) >= 20
    spelt = [word for word in words if re.fullmatch(r"[('-]*[A-Za-z]+(['-]+[A-Za-z]+)*\W*", word)]
    assert len(spelt) >= 0.95 * len(words)
    known = set(COMMON_WORDS.split())
    common = [word for word in words if word.lower().strip(".,;:!?'-") in known]
    assert len(common) >= 0.5 * len(words)


@pytest.mark.parametrize("question", ["Who is there?", "Good morrow, my lord."])
def test_chat_turn_is_answered_and_ended(model: Any, tokenizer: Any, question: str) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    answer = greedy(model, tokenizer, prompt, 200)
    assert answer.endswith("<|im_end|>")
    assert re.search(r"[a-z]{2}", answer.removesuffix("<|im_end|>"))
    assert answer.count("<|") == 1
