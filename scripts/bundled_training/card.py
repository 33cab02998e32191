"""Writes the model card: what the model is, how it was trained, and how it does."""

import textwrap

from .chat_format import END_OF_TEXT, TURN_END, TURN_START
from .evaluation import HeldOut, sample
from .model import count_parameters
from .shape import Shape
from .trainer import Trainer

FRONT_MATTER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_moe, mixture-of-experts, shakespeare]
---"""

INTRODUCTION = """# The bundled model

A small language model that continues Shakespeare's plays and answers chat turns in character. It
is here so that the stack can be tried and tested with a real mixture-of-experts model, offline and
without an accelerator. It is not meant to be useful beyond that."""

LICENCE = """## Licence

The weights, the tokenizer and this page are under the Apache License 2.0. The training text is in
the public domain."""


def prose(text: str) -> str:
    """Return text as one paragraph of lines of at most 100 characters."""
    words = " ".join(text.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False)


def facts(shape: Shape, result: HeldOut) -> str:
    """Return the table of sizes and losses."""
    total, active = count_parameters(shape)
    return f"""| | |
| --- | --- |
| Architecture | `Qwen3MoeForCausalLM`: {shape.num_hidden_layers} layers, hidden size \
{shape.hidden_size}, {shape.num_attention_heads} query and {shape.num_key_value_heads} key-value \
heads of {shape.head_dim}, {shape.num_experts} experts of width {shape.moe_intermediate_size} in \
every layer, {shape.num_experts_per_tok} for each token, tied embeddings |
| Parameters | {total:,} in total, {active:,} active for each token |
| Weights | bfloat16 |
| Context | {shape.max_position_embeddings} tokens |
| Tokenizer | byte-level BPE, {shape.vocab_size:,} tokens, 3 of them special |
| Held-out loss | {result.nats_per_token:.3f} nats per token, {result.bits_per_byte:.3f} bits per \
byte |"""


def data_section(trainer: Trainer) -> str:
    """Return what the model has learnt from."""
    options = trainer.options
    train_tokens = len(trainer.tokenizer.encode(trainer.train_text).ids)
    data = prose(
        f"""The "Tiny Shakespeare" text: 1.1 MB of Shakespeare's plays, in the public domain. The
        model and its tokenizer learnt from the first 95 % ({train_tokens:,} tokens); the last 5 %
        are held out."""
    )
    mixture = prose(
        f"""{1 - options.chat_share:.0%} of the training windows are plain text, in scenes that end
        with `{END_OF_TEXT}`. The others are dialogues in the chat format: one speech is the user's
        turn, the next one the assistant's, and each turn stands between `{TURN_START}` and
        `{TURN_END}`. Some have a system message that names the assistant's part, such as `You are
        ROMEO.`."""
    )
    return f"## Data\n\n{data}\n\n{mixture}"


def training_section(trainer: Trainer, result: HeldOut, best_step: int) -> str:
    """Return how the model was trained, with the numbers of this run."""
    options, shape = trainer.options, trainer.shape
    shares = [share for layer in result.shares for share in layer]
    seen = trainer.step * options.batch_tokens
    recipe = prose(
        f"""Trained from scratch by `scripts/train_bundled_model.py` in
        {trainer.seconds / 60:.0f} minutes on
        {"one processor core" if options.threads == 1 else f"{options.threads} processor cores"}:
        {trainer.step:,} of {options.steps:,} steps of {options.batch_tokens:,} tokens
        ({seen / 1e6:.1f} M tokens), Muon (AdamW for the embedding and the gates) at a peak rate of
        {options.learning_rate:g} with a cosine schedule, weight decay {options.weight_decay:g},
        dropout {options.dropout:g} and {options.token_dropout:.0%} of the input tokens left out,
        bfloat16 arithmetic over float32 weights, seed {options.seed}. Windows are {options.length}
        tokens long, and {shape.max_position_embeddings} in the last {options.long_share:.0%} of
        the steps."""
    )
    balance = prose(
        f"""A balance loss ({options.balance:g}) keeps all experts in use: on the held-out text one
        expert of a layer gets between {min(shares):.1%} and {max(shares):.1%} of the routed
        tokens."""
    )
    choice = prose(
        f"""The weights are those of step {best_step:,}, which had the lowest held-out loss of all
        measured ({options.evaluate_every} steps apart). The held-out text chose this step, and in
        a few trial runs the optimizer, the number of steps and the regularisation, so a text that
        played no part at all might come out a little worse."""
    )
    return f"## Training\n\n{recipe}\n\n{balance}\n\n{choice}"


def samples_section(trainer: Trainer) -> str:
    """Return what the model writes of its own and in a chat."""
    chat = f"{TURN_START}user\nWho is there?{TURN_END}\n{TURN_START}assistant\n"
    romeo = sample(trainer.model, trainer.tokenizer, "ROMEO:").strip()
    answer = sample(trainer.model, trainer.tokenizer, chat)
    return f"""## Samples

`ROMEO:`, temperature 0.7:

```
ROMEO:
{romeo}
```

The chat turn `Who is there?`, temperature 0.7:

```
{answer}
```"""


def limits_section(shape: Shape) -> str:
    """Return what not to expect of the model."""
    return f"""## Limits

- It knows one million bytes of one author. It writes lines of about the right form, in words that
  mostly exist, and makes little sense beyond a line or two.
- It follows no instructions and knows no facts. A system message can name a part to play, which
  colours the answer at best.
- English as Shakespeare wrote it is all it has seen: digits, other languages and emoji are
  represented without loss but mean nothing to it.
- Contexts beyond {shape.max_position_embeddings} tokens do not work.
- The text has the views of its time, and so has the model."""


def model_card(trainer: Trainer, result: HeldOut, best_step: int) -> str:
    """Return README.md with the numbers of this run."""
    sections = (
        FRONT_MATTER,
        INTRODUCTION,
        facts(trainer.shape, result),
        data_section(trainer),
        training_section(trainer, result, best_step),
        samples_section(trainer),
        limits_section(trainer.shape),
        LICENCE,
    )
    return "\n\n".join(sections) + "\n"
