"""Shifts the time of day of a process and its children at run time; other clocks are unchanged.

A small library, compiled on demand and preloaded, adds an offset from a shared file to all readings
of the time of day.
"""

import struct
from pathlib import Path

from benchmarks.preload import compile_preload

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
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

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    if (out) *out = time.tv_sec;
    return time.tv_sec;
}
"""


class ShiftedClock:
    """A preloaded library and its offset file, created in `directory`.

    Raises:
        OSError: there is no compiler, or it failed.
    """

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "offset"
        self.shift(0)
        library = compile_preload(_SOURCE, directory, "clock")
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIM_FILE": str(self._offset)}

    def shift(self, seconds: int) -> None:
        """Set how many seconds the processes' clock is ahead of the real one."""
        if not self._offset.exists():
            self._offset.touch(0o600)
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))
