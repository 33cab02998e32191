"""Semantic search over a small text; prints the sentences that fit each question best."""

import os

from openai import OpenAI

TEXT = """The cat sleeps on the warm stove. Interest rates rose again this quarter.
A kitten chased its tail around the kitchen. The central bank worries about inflation.
Rain is expected over the weekend. The striker scored twice in the final minutes.
Storms will reach the coast by Sunday. Her team won the championship on penalties."""

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")


def embed(texts: list[str]) -> list[list[float]]:
    return [each.embedding for each in client.embeddings.create(model=MODEL, input=texts).data]


MODEL = client.models.list().data[0].id
sentences = [each.strip(" .\n") for each in TEXT.replace("\n", " ").split(". ")]
vectors = embed(sentences)
for question in ("pets at home", "money and economics", "what will the weather be like", "sports"):
    (asked,) = embed([question])
    scores = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
    best = sorted(zip(scores, sentences, strict=True), reverse=True)[:2]
    print(f"{question}: {'; '.join(f'{text} ({score:.2f})' for score, text in best)}")
