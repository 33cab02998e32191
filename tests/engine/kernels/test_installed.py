"""Preinstalled kernels are exactly the ones that engines request."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu import installed
from engine.kernels.cpu.compiling import TARGET
from engine.kernels.cpu.installed import environment_for
from engine.kernels.cpu.kernel_cache import installed_directory
from engine.kernels.cpu.targets import X86_TARGETS, Target

PROGRAM = """
import sys
sys.prefix = sys.argv[1]
from engine.kernels.cpu.installed import COMMON_HEADS, kernels_for
from engine.kernels.cpu.targets import X86_TARGETS
for target in X86_TARGETS:
    assert all(kernels_for(target, COMMON_HEADS))
from engine.kernels.cpu.rows import swiglu
print(swiglu._compiled.cache_hits)
print(*sorted(name for name in sys.modules if name.startswith("engine.")))
"""


@pytest.mark.stack
def test_kernels_compiled_for_target_are_loaded_on_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = str(tmp_path / "installation")

    def run(environment: dict[str, str]) -> tuple[str, list[str]]:
        """Return how often the program found its kernel, and the modules that it needed."""
        hits, modules = subprocess.run(
            [sys.executable, "-c", PROGRAM, prefix],
            env=os.environ | environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.splitlines()
        return hits, modules.split()

    monkeypatch.setattr(sys, "prefix", prefix)
    directory = installed_directory(TARGET.name)
    directory.mkdir(parents=True)
    assert run(environment_for(TARGET, directory))[0] == "0"
    hits, modules = run({"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""})
    assert hits == "1"
    copied = ("engine.kernels", "engine.shared.user_cache")
    others = [name for name in modules if not name.startswith(copied)]
    assert others == ["engine.shared"], "the image of engines copies these"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], [each.name for each in X86_TARGETS]), (["avx512-bf16"], ["avx512-bf16"])],
)
def test_all_or_named_targets_are_compiled(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Target]()
    monkeypatch.setattr(installed, "is_x86", lambda: True)
    monkeypatch.setattr(installed, "compile_all", compiled.extend)
    monkeypatch.setattr(sys, "argv", ["installed", *arguments])
    installed.main()
    assert [each.name for each in compiled] == expected


def test_unknown_target_is_refused_with_known_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["installed", "avx3"])
    with pytest.raises(SystemExit):
        installed.main()
    assert "'avx3' is not one of amx, avx512-bf16" in capsys.readouterr().err


def test_engines_compile_at_start_without_installed_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "is_x86", lambda: False)
    monkeypatch.setattr(sys, "argv", ["installed"])
    installed.main()
    assert "only compiled ahead for x86" in capsys.readouterr().out
