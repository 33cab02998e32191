"""Compiles small libraries that are preloaded into the processes of a stack."""

import struct
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


_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static int64_t offset(void) {
    static volatile int64_t *shared;
    if (!shared) {
        const char *path = getenv("CLOCK_SHIM_FILE");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        shared = mmap(0, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        if (shared == MAP_FAILED) shared = 0;
        return shared ? *shared : 0;
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += offset();
    return result;
}
"""


class ShiftedClock:
    """Shifts the time of day of processes and their children; other clocks are unchanged.

    A preloaded library adds an offset from a file in `directory` to `clock_gettime`, with which
    Python reads the time of day.

    Raises:
        OSError: there is no compiler, or it failed.
    """

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "offset"
        self._offset.write_bytes(bytes(8))
        library = compile_preload(_CLOCK, directory, "clock")
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIM_FILE": str(self._offset)}

    def shift(self, seconds: int) -> None:
        """Set how many seconds the processes' clock is ahead of the real one."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))
