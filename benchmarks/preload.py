"""Compiles small libraries that are preloaded into the processes of a stack."""

import subprocess
from pathlib import Path


def compile_preload(source: str, directory: Path, name: str) -> Path:
    """Compile C source to a library in `directory`; return its path, for LD_PRELOAD.

    Raises:
        OSError: there is no compiler, or it failed.
    """
    code, library = directory / f"{name}.c", directory / f"{name}.so"
    code.write_text(source)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(code), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
    return library
