"""The command line: what it understands, and what it says about what it does not."""

import pytest

from server.cli import COMMANDS
from server.flags import build_parser, parse


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(COMMANDS, list(argv))
    assert end.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("serve --max-num-seq 5", "swell serve: unknown flag --max-num-seq: did you mean"),
        ("serve --max_num_seqs=5", "did you mean --max-num-seqs?"),
        ("serve m --no-enable-prefix-cachin", "did you mean --no-enable-prefix-caching?"),
        ("engine --conf x.yaml", "did you mean --config?"),
        ("engine --api-server-count 2", "it is a flag of `swell serve`, `swell api-server`,"),
        ("serve --frobnicate", "unknown flag --frobnicate (`swell serve --help` lists all)"),
        ("engine model another", "swell engine: unexpected argument another"),
        ("serve one --model another", "swell serve: one and --model another: give one of them"),
        ("srve", "swell: unknown command srve: did you mean serve?"),
        ("frobnicate", "swell: unknown command frobnicate: there are serve, coordinator,"),
    ],
)
def test_a_mistake_is_told_what_may_have_been_meant(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert message in refusal(capsys, *argv.split())


def test_flags_are_not_abbreviated_so_that_a_new_one_changes_no_old_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "unknown flag --max-num-s" in refusal(capsys, "serve", "--max-num-s", "5")


def test_settings_may_stand_without_their_flags_where_the_command_says_so() -> None:
    assert parse(COMMANDS, ["serve", "my-model"])["model"] == "my-model"
    assert parse(COMMANDS, ["serve", "--model", "my-model"])["model"] == "my-model"
    assert parse(COMMANDS, ["serve", "m", "--model", "m"])["model"] == "m"
    assert parse(COMMANDS, ["run-batch", "in", "out"])["output_file"] == "out"
    assert parse(COMMANDS, ["run-batch", "-i", "in", "-o", "out"])["input_file"] == "in"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_every_setting(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(COMMANDS, [name, "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert COMMANDS[name].example.splitlines()[0] in text
    assert not [s.flag for s in COMMANDS[name].settings if s.flag not in text]


def test_every_example_is_a_command_that_is_understood() -> None:
    parser = build_parser(COMMANDS)
    for command in COMMANDS.values():
        for line in command.example.replace("\\\n", "").splitlines():
            words = line.split(" #")[0].split(" > ")[0].removeprefix('eval "$(').rstrip(' )"')
            words = words.removeprefix("SWELL_ADMIN_KEY=... ")
            assert words.startswith("swell ")
            _, unknown = parser.parse_known_args(words.split()[1:])
            assert not unknown
