"""Runs `vllm bench serve` again and again in one process of the peer's environment.

It is run as a file by the peer's interpreter, so it imports nothing of Swell. Each line on its
standard input is a JSON list of the arguments of one run; its answer is one JSON line: the run's
result, or {"error": ...}. Everything else goes to standard error.
"""

import argparse
import asyncio
import contextlib
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main_async


def run(arguments: list[str]) -> dict[str, object]:
    """Return the plain numbers of one run."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with contextlib.redirect_stdout(sys.stderr):
        result = asyncio.run(main_async(parser.parse_args(arguments)))
    return {name: value for name, value in result.items() if isinstance(value, (int, float, str))}


def main() -> None:
    """Answer lines until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
