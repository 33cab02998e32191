"""Writes docs/status-page.png: the status page of a stack under load.

python scripts/screenshot_status_page.py --seconds 40
python scripts/screenshot_status_page.py --phone --dark --target /tmp/page.png
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.headless_chromium import Browser, find
from benchmarks.running_stack import RunningStack
from engine.shared.writable import writable_file

TARGET = Path(__file__).parent.parent / "docs" / "status-page.png"
SWELL = str(Path(sys.executable).with_name("swell"))
PLAY = (
    "document.getElementById('prompt').value = 'ROMEO:\\nBut soft, what light';"
    "document.getElementById('playground').requestSubmit()"
)


def shoot(url: str, program: str, options: argparse.Namespace) -> bytes:
    """Return a PNG of the page after it has watched the load for a while."""
    width, height = (390, 844) if options.phone else (1200, 1160)
    if options.full:
        height = 2200 if options.phone else 1600
    requests = int(options.rate * (options.seconds + 30))
    load = subprocess.Popen(
        [
            SWELL, "bench", "--url", url, "--num-prompts", str(requests), "--no-progress",
            "--request-rate", str(options.rate),
            "--burstiness", "0.3", "--random-input-len", "100", "--random-output-len", "200",
            "--random-range-ratio", "0.8", "--ignore-eos",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with Browser(program) as browser:
            browser.open(url, width=width, height=height, dark=options.dark)
            path = "document.querySelector('#token-spark .line').getAttribute('d') ?? ''"
            browser.wait_until(
                f"({path}).split('L').length >= {options.seconds}", 2 * options.seconds + 30
            )
            browser.run(PLAY)
            browser.wait_until("document.getElementById('output-facts').textContent", 60)
            return browser.screenshot()
    finally:
        load.terminate()
        load.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="seconds of load before the shot")
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second")
    parser.add_argument("--phone", action="store_true", help="the width of a phone")
    parser.add_argument("--full", action="store_true", help="high enough for the whole page")
    parser.add_argument("--dark", action="store_true", help="dark colours")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--url", help="a stack that runs already")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    program = find()
    if program is None:
        parser.error("no Chromium is installed")
    writable_file(options.target)
    if options.url:
        picture = shoot(options.url, program, options)
    else:
        with RunningStack("--log-level", "warning", *options.serve) as stack:
            picture = shoot(stack.url, program, options)
    options.target.write_bytes(picture)
    print(f"{options.target}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
