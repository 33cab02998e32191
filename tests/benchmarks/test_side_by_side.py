"""What the comparison says about the machine, and its tables."""

from benchmarks.side_by_side import Results, Run, Start, as_markdown, machine
from engine.kernels.processor import kind


def test_processor_is_named_with_numbers_of_its_kind() -> None:
    intel = "processor : 0\ncpu family : 6\nmodel : 167\nmodel name : Some Xeon\n\n"
    assert machine(intel + intel).endswith(f" cores Some Xeon, family 6, model 167 ({kind()})")
    assert machine("processor : 0\nCPU part : 0xd4f\n").endswith(f", part 0xd4f ({kind()})")


def test_each_side_uses_its_best_number_of_engines() -> None:
    results = Results("here", {}, "2026-11-24 03:00", "abc1234")
    for name, side, engines, values in (
        ("2-layer 100/128 x64", "vLLM", 1, (100, 300, 200)),
        ("2-layer 100/128 x64", "Swell", 1, (700, 700)),
        ("2-layer 100/128 x64", "Swell", 2, (800, 800)),
        ("0.4b 16/128 x1", "vLLM", 1, (40,)),
        ("0.4b 16/128 x1", "Swell", 1, (20,)),
        ("0.4b 16/128 x1", "vLLM in Swell", 1, (50,)),
    ):
        results.runs += [Run(name, side, engines, at, value) for at, value in enumerate(values)]
    results.starts.append(Start("Swell", "2-layer", 2, 0, 1.9, 693.0))
    lines = as_markdown(results).splitlines()
    assert [line for line in lines if line.startswith(("| 0.4b", "| 2-layer"))] == [
        "| 0.4b 16/128 x1 | ms per token | 40.0 (40.0 to 40.0) | 20.0 (20.0 to 20.0) | 2.00x |"
        " 50.0 (50.0 to 50.0) | 0.80x | >= 1.1x |",
        "| 2-layer 100/128 x64 | output tok/s | 200 (100 to 300), DP=1 | 800 (800 to 800), DP=2 |"
        " 4.00x |  |  | >= 3.2x |",
        "| 2-layer | Swell | 2 | 1.9 | 693 |",
    ]
