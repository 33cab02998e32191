"""Log lines to pipes that are not read, full or closed."""

import fcntl
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from engine.shared.logs import MAX_BACKLOG, LogStream
from tests.support.waiting import PATIENCE, until

LINE = f"{'x' * 999}\n"


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], LogStream]]:
    """A pipe's reading end, and a stream in front of its other."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader, LogStream(writing) as stream:
        yield reader, stream
    os.close(writing)


def everything(reader: IO[bytes], stream: LogStream) -> bytes:
    """Read until all is written that has been given to the stream."""
    read = b""
    while True:
        is_all = stream.is_written
        while select.select([reader], [], [], 0)[0] and (piece := reader.read(1 << 16)):
            read += piece
        if is_all:
            return read


def test_line_is_written_before_write_returns(pipe: tuple[IO[bytes], LogStream]) -> None:
    reader, stream = pipe
    print("last words", file=stream)
    assert reader.read(100) == b"last words\n"


def test_stalled_reader_blocks_no_writer_and_gets_all_lines_later(
    pipe: tuple[IO[bytes], LogStream],
) -> None:
    reader, stream = pipe
    for _ in range(500):
        stream.write(LINE)  # a pipe holds 64 KiB
    assert everything(reader, stream) == LINE.encode() * 500


def test_excess_lines_are_dropped_and_counted_once(pipe: tuple[IO[bytes], LogStream]) -> None:
    reader, stream = pipe
    lines = 2 * MAX_BACKLOG // len(LINE)
    for _ in range(lines):
        stream.write(LINE)
    stream.write("")
    read = everything(reader, stream)
    stream.write("on we go\n")
    read += everything(reader, stream)
    told = [line for line in read.splitlines() if b"lost" in line]
    (note,) = told
    lost = int(note.split()[0][1:])
    assert read.count(b"\nx") + read.startswith(b"x") + lost == lines
    assert read.endswith(b"on we go\n")


def test_exited_reader_raises_no_error() -> None:
    reading, writing = os.pipe()
    with LogStream(writing) as stream:
        os.close(reading)
        for _ in range(200):
            print(LINE, file=stream)
    os.close(writing)


def test_a_closed_stream_ends_its_thread_and_writes_nothing_more() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader:
        before = threading.active_count()
        with LogStream(writing) as stream:
            stream.write("said\n")
        stream.write("too late\n")
        os.close(writing)
        assert reader.read() == b"said\n"
        until(lambda: threading.active_count() <= before, "its thread ends")


def test_lines_of_threads_are_not_interleaved(pipe: tuple[IO[bytes], LogStream]) -> None:
    reader, stream = pipe
    threads = [
        threading.Thread(target=lambda c=letter: [stream.write(f"{c * 700}\n") for _ in range(200)])
        for letter in "abcd"
    ]
    for thread in threads:
        thread.start()
    read = b""
    while any(thread.is_alive() for thread in threads):
        read += everything(reader, stream)
    read += everything(reader, stream)
    for thread in threads:
        thread.join()
    lines = read.splitlines()
    assert len(lines) == 800
    assert all(len(set(line)) == 1 and len(line) == 700 for line in lines)


def test_non_blocking_pipe_is_supported() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    with os.fdopen(reading, "rb", buffering=0) as reader, LogStream(writing) as stream:
        for _ in range(200):
            stream.write(LINE)
        assert everything(reader, stream) == LINE.encode() * 200
    os.close(writing)


def test_lines_lost_on_full_disk_are_reported_later(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
import resource, signal
from engine.shared.logs import LogStream

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
stream = LogStream(2)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
stream.write("first\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
stream.write("this is cut off as the disk is full\\n")
stream.write("lost\\n")
stream.write("lost\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
stream.write("room again\\n")
"""
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", program], stderr=file, check=True, timeout=PATIENCE)
    assert log.read_text().splitlines() == [
        "first",
        "this is cut of",
        "[3 log lines were lost: File too large]",
        "room again",
    ]


def test_full_disk_raises_no_error() -> None:
    with Path("/dev/full").open("wb") as full, LogStream(full.fileno()) as stream:
        print("not written", file=stream, flush=True)


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_opened_files_never_get_descriptor_of_closed_stderr(closed: str) -> None:
    program = (
        "import os, sys; from engine.shared.logs import open_standard_descriptors as o; o();"
        "from engine.shared.logs import name_process; name_process('x', 'info');"
        "assert os.open('/dev/zero', os.O_RDONLY) > 2;"
        "assert all(os.path.exists(f'/proc/self/fd/{n}') for n in range(3));"
        "print('to nobody', file=sys.stderr)"
    )
    command = f'"{sys.executable}" -c "{program}" {closed}'
    subprocess.run(command, shell=True, check=True, timeout=PATIENCE)
