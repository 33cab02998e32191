"""Preinstalled kernels are exactly the ones that engines request."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu import installed
from engine.kernels.cpu.compiling import TARGET
from engine.kernels.cpu.installed import COMMON_HEADS, environment_for
from engine.kernels.cpu.targets import X86_TARGETS, Target
from engine.models.hf_config import read_spec
from engine.shared.config import BUNDLED_MODEL

LOADED = """
import sys
sys.prefix = sys.argv[1]
from engine.kernels.cpu.rows import swiglu
print(swiglu._compiled.cache_hits)
"""
LOCATED = """
import sys
sys.prefix = sys.argv[1]
from engine.kernels.cpu.kept import installed_directory
print(installed_directory(sys.argv[2]))
"""


def printed(program: str, *arguments: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()


@pytest.mark.stack
def test_what_was_compiled_for_a_target_is_loaded_on_its_processors(tmp_path: Path) -> None:
    prefix = str(tmp_path / "installation")
    directory = Path(printed(LOCATED, prefix, TARGET.name, environment={}))
    directory.mkdir(parents=True)
    assert printed(LOADED, prefix, environment=environment_for(TARGET, directory)) == "0"
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    assert printed(LOADED, prefix, environment=own) == "1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], [each.name for each in X86_TARGETS]), (["avx512-bf16"], ["avx512-bf16"])],
)
def test_all_targets_are_compiled_for_or_those_that_are_named(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Target]()
    monkeypatch.setattr(installed, "is_x86", lambda: True)
    monkeypatch.setattr(installed, "compile_all", compiled.extend)
    monkeypatch.setattr(sys, "argv", ["installed", *arguments])
    installed.main()
    assert [each.name for each in compiled] == expected


def test_a_name_that_is_no_target_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["installed", "avx3"])
    with pytest.raises(SystemExit):
        installed.main()
    assert "'avx3' is not one of amx, avx512-bf16" in capsys.readouterr().err


def test_elsewhere_engines_compile_as_they_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "is_x86", lambda: False)
    monkeypatch.setattr(sys, "argv", ["installed"])
    installed.main()
    assert "only compiled ahead for x86" in capsys.readouterr().out


def test_the_bundled_model_has_common_heads() -> None:
    spec = read_spec(BUNDLED_MODEL)
    group = spec.num_heads // spec.num_kv_heads
    assert COMMON_HEADS[0] == (group, spec.head_dim, spec.num_kv_heads)


def test_no_other_module_of_the_engine_is_needed() -> None:
    program = """
import sys
from engine.kernels.cpu.installed import COMMON_HEADS, kernels_for
from engine.kernels.cpu.targets import X86_TARGETS, Target
for target in X86_TARGETS:
    assert all(kernels_for(target, COMMON_HEADS))
print(*sorted(name for name in sys.modules if name.startswith("engine.")))
"""
    needed = printed(program, environment={}).split()
    copied = ("engine.kernels", "engine.shared.user_cache")
    others = [name for name in needed if not name.startswith(copied)]
    assert others == ["engine.shared"], "the image of engines copies these"
