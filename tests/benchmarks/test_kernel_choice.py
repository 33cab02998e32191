"""Which kernels serve on a kind of processor follows from what was compared on it."""

import pytest

from benchmarks import kernel_choice
from benchmarks.kernel_choice import Findings, Pair, chosen
from engine.kernels import processor
from engine.kernels.cpu.avx512 import has_pairs
from engine.kernels.processor import ALL_ROWS


def products(*ratios: float) -> list[Pair]:
    return [
        Pair("product", rows, ratio, 1.0)
        for rows, ratio in zip((1, 16, 32, 64), ratios, strict=False)
    ]


def findings(
    of_products: list[Pair], prompt: float | None = 0.5, decode: float = 0.8, step: float = 0.9
) -> Findings:
    return Findings(
        of_products,
        [Pair("16 decodes, keys", 140, decode, 1.0)],
        [] if prompt is None else [Pair("prompt", 40, 0.5, 1.0), Pair("prompt", 512, prompt, 1.0)],
        [Pair("decode, 1 rows", 1, step, 1.0), Pair("prefill, 512 tokens", 512, 2.0, 1.0)],
    )


def test_product_kernels_are_used_up_to_largest_row_count_not_slower() -> None:
    assert chosen(findings(products(0.8, 0.9, 1.0, 1.02))) == (ALL_ROWS, True)
    assert chosen(findings(products(0.8, 0.9, 1.1, 0.9))) == (16, True)
    assert chosen(findings(products(1.2, 0.9))) == (0, True)
    assert chosen(findings([])) == (0, True)


def test_prompt_kernel_is_used_if_no_prompt_is_slower() -> None:
    assert chosen(findings(products(0.8), prompt=1.5)) == (ALL_ROWS, False)
    assert chosen(findings(products(0.8), prompt=None)) == (ALL_ROWS, False)


def test_torch_is_used_if_decodes_are_not_faster() -> None:
    assert chosen(findings(products(0.8), decode=1.2)) is None
    assert chosen(findings(products(0.8), step=1.2)) is None


def test_comparison_runs_with_small_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "OUTPUTS": 128,
        "INPUTS": 64,
        "MATRICES": 2,
        "ROWS": (1, 40),
        "DECODES": ((2, 20),),
        "PROMPTS": (9,),
    }.items():
        monkeypatch.setattr(kernel_choice, name, value)
    step = Pair("decode, 1 rows", 1, 0.9, 1.0)
    monkeypatch.setattr(kernel_choice, "compare_steps", lambda _model, _rounds: [step])
    before = processor.MEASURED
    kernel_choice.report(kernel_choice.measure_all("2-layer", 1))
    assert processor.MEASURED is before
    printed = capsys.readouterr().out
    assert "decode, 1 rows" in printed
    assert ("2 decodes, keys" in printed) is has_pairs()
    assert "found: " in printed
