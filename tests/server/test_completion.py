"""`swell completion`: the suggestions offered by shells."""

import subprocess

import pytest

from server.cli import COMMANDS, main
from server.completion import script

BASH = script(COMMANDS, "bash")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("swell ser", {"serve"}),
        (
            "swell serve --max-num-",
            {"--max-num-seqs", "--max-num-batched-tokens", "--max-num-encoder-tokens"},
        ),
        ("swell serve --no-enable-pre", {"--no-enable-prefix-caching"}),
        ("swell serve --dtype f", {"float16", "float32"}),
        ("swell engine --api-server-c", set()),
        ("swell bench --backend ", {"openai", "openai-chat"}),
        ("swell serve --chat-template /etc/host", {"/etc/hosts"}),
        ("swell completion ", {"bash", "zsh", "fish", "tcsh"}),
    ],
)
def test_bash_completes_matching_words(line: str, offered: set[str]) -> None:
    words = line.split(" ")
    program = (
        f"{BASH}\nCOMP_WORDS=({' '.join(map(repr, words))})\n"
        "COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))\n"
        'cd /; "$(complete -p swell | sed "s/.*-F \\([^ ]*\\).*/\\1/")"\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=90)
    found = set(done.stdout.split())
    assert found >= offered
    assert offered or not found, done.stderr
    if "/etc" not in line:
        assert found == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_every_shell_gets_every_command_and_flag(shell: str) -> None:
    text = script(COMMANDS, shell)
    for name, command in COMMANDS.items():
        assert name in text
        for setting in command.settings:
            assert setting.key in text


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == BASH
