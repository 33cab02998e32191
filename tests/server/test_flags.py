"""The command line: accepted flags, and errors for the others."""

import re

import pytest

from engine.shared.settings import load
from server.cli import COMMANDS, main
from server.flags import COMMON, INSTEAD, NOT_NEEDED, TUNING, build_parser, parse
from server.ineffective import ineffective_settings


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(COMMANDS, list(argv))
    assert end.value.code == 2
    return capsys.readouterr().err.strip()


def test_vllm_api_key_variable_protects_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert main(["serve"]) == 2
    message = capsys.readouterr().err
    assert "rename the variable to SWELL_API_KEY" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("serve --max-num-seq 5", "swell serve: unknown flag --max-num-seq: did you mean"),
        ("serve --max_num_seqs=5", "did you mean --max-num-seqs?"),
        ("serve m --no-enable-prefix-cachin", "did you mean --no-enable-prefix-caching?"),
        ("engine --conf x.yaml", "did you mean --config?"),
        ("engine --api-server-count 2", "it is a flag of `swell serve`, `swell api-server`,"),
        ("serve --frobnicate", "unknown flag --frobnicate (`swell serve --help-all` lists all)"),
        ("serve m --num-gpu-blocks-override=9", "is vLLM's: use --num-kv-blocks"),
        ("serve m --structured-outputs-config.backend xgrammar", "is vLLM's: leave it out"),
        ("serve m --tokenizer other", "--tokenizer is vLLM's: the tokenizer is the model's own"),
        ("engine model another", "swell engine: unexpected argument another"),
        ("serve one --model another", "swell serve: one and --model another: give one of them"),
        ("srve", "swell: unknown command srve: did you mean serve?"),
        ("frobnicate", "swell: unknown command frobnicate: there are serve, coordinator,"),
    ],
)
def test_misspelt_flag_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    assert message in refusal(capsys, *argv.split())


def test_vllm_flags_for_default_behaviour_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "m", "--trust-remote-code", "--max-num-seqs", "5", "--enable-sleep-mode"]
    assert parse(COMMANDS, [*argv, "--enable-request-id-headers"])["max_num_seqs"] == "5"
    assert capsys.readouterr().err.splitlines() == [
        "swell serve: --trust-remote-code is not needed: code that comes with a model is never run",
        "swell serve: --enable-sleep-mode is not needed: engines can always be put to sleep",
        "swell serve: --enable-request-id-headers is not needed: every answer has X-Request-Id",
    ]


def test_advice_about_vllm_flags_names_existing_flags() -> None:
    known = {word for s in COMMANDS["serve"].settings for word in (s.flag, f"--no-{s.key}")}
    named = re.findall(r"--[a-z-]+", " ".join([*INSTEAD.values(), *NOT_NEEDED.values()]))
    assert set(named) <= known
    assert not known & (INSTEAD.keys() | NOT_NEEDED.keys())


def test_flags_cannot_be_abbreviated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "unknown flag --max-num-s" in refusal(capsys, "serve", "--max-num-s", "5")


def test_some_settings_can_be_positional() -> None:
    assert parse(COMMANDS, ["serve", "my-model"])["model"] == "my-model"
    assert parse(COMMANDS, ["serve", "--model", "my-model"])["model"] == "my-model"
    assert parse(COMMANDS, ["serve", "m", "--model", "m"])["model"] == "m"
    assert parse(COMMANDS, ["run-batch", "in", "out"])["output_file"] == "out"
    assert parse(COMMANDS, ["run-batch", "-i", "in", "-o", "out"])["input_file"] == "in"


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(COMMANDS, list(argv))
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_full_help_shows_an_example_and_every_setting(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = help_of(capsys, name, "--help-all")
    assert COMMANDS[name].example.splitlines()[0] in text
    assert not [s.flag for s in COMMANDS[name].settings if s.flag not in text]


def test_short_help_shows_common_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "serve", "--help")
    shown = {
        s.name for s in COMMANDS["serve"].settings if re.search(rf"^  {s.flag}[ ,]", text, re.M)
    }
    assert shown == COMMON
    assert "--help-all" in text
    assert COMMANDS["serve"].example.splitlines()[0] in text


def test_settings_in_short_help_exist() -> None:
    names = {s.name for s in COMMANDS["serve"].settings}
    assert names >= COMMON
    assert names >= TUNING


def test_tuning_flag_sets_advanced_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "--tuning", "publish-interval=0.5", "level_wait_weight=8"]
    flags = parse(COMMANDS, argv)
    assert (flags["publish_interval"], flags["level_wait_weight"]) == ("0.5", "8")
    assert "did you mean publish_interval?" in refusal(
        capsys, "serve", "--tuning", "publish-intervall=1"
    )
    assert "KEY=VALUE" in refusal(capsys, "serve", "--tuning", "publish-interval")


@pytest.mark.parametrize(
    ("argv", "warning"),
    [
        ("--max-loras 2", "--max-loras has no effect without --enable-lora"),
        ("--max-loras 2 --enable-lora", None),
        ("--num-speculative-tokens 2", "--speculative-model or --speculative-method mtp"),
        ("--admission-policy level", "--enable-expert-parallel"),
        ("--admission-policy level --enable-expert-parallel", None),
        ("--ray-namespace a --ray-env B=1", "--ray-namespace, --ray-env have no effect without"),
        ("--prompt-lookup-max 5 --speculative-ngram 4", None),
        ("--response-store none --response-store-age 5", "a --response-store"),
        ("--kv-transfer-bytes 9", "--kv-role, --prefill-engines or --kv-transfer-config"),
        ('--kv-transfer-bytes 9 --kv-transfer-config {"kv_role":"kv_both"}', None),
        ("--prefill-engines 2 --data-parallel-size 2", "a larger --data-parallel-size"),
        ("--prefill-engines 1 --data-parallel-size 2", None),
        ("--kv-disk-tier-bytes 1GiB", "without --kv-disk-tier-dir"),
        ("--kv-tier-policy evicted", "--kv-memory-tier-bytes, --kv-disk-tier-dir"),
        ("--kv-tier-policy evicted --kv-memory-tier-bytes 1GiB", None),
    ],
)
def test_a_flag_without_effect_is_named(argv: str, warning: str | None) -> None:
    flags = parse(COMMANDS, ["serve", *argv.split()])
    found = list(ineffective_settings(load(COMMANDS["serve"].config, flags, {}, None)))
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_are_never_warned_of(name: str) -> None:
    needed = {"fetch": {"model": "a/b"}, "completion": {"shell": "bash"},
              "run-batch": {"input_file": "i", "output_file": "o"}}  # fmt: skip
    config = load(COMMANDS[name].config, needed.get(name, {}), {}, None)
    assert list(ineffective_settings(config)) == []


def test_every_example_is_a_valid_command() -> None:
    parser = build_parser(COMMANDS)
    for command in COMMANDS.values():
        for line in command.example.replace("\\\n", "").splitlines():
            words = line.split(" #")[0].split(" > ")[0].removeprefix('eval "$(').rstrip(' )"')
            words = words.removeprefix("SWELL_ADMIN_KEY=... ")
            assert words.startswith("swell ")
            _, unknown = parser.parse_known_args(words.split()[1:])
            assert not unknown


def test_list_can_be_given_by_repeated_flags() -> None:
    words = ["serve", "--api-key", "a", "--api-key", "b", "c", "--allowed-hosts", "x.example"]
    flags = parse(COMMANDS, words)
    assert flags["api_key"] == ["a", "b", "c"]
    assert flags["allowed_hosts"] == ["x.example"]
