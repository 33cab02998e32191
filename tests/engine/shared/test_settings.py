"""Settings from flags, environment, YAML and defaults."""

import json
from pathlib import Path

import pytest

from engine.shared import settings
from engine.shared.config import EngineConfig
from engine.shared.settings import SettingsError
from server.config import FrontEndConfig, ServeConfig
from server.flags import Command, parse
from tests.support.plugins import offer

COMMANDS = {"engine": Command("run", "", EngineConfig, lambda _: 0)}


def load(
    argv: list[str], environment: dict[str, str] | None = None, file: Path | None = None
) -> EngineConfig:
    return settings.load(EngineConfig, parse(COMMANDS, ["engine", *argv]), environment or {}, file)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "swell.yaml"
    file.write_text("max-num-seqs: 3\nblock_size: 8\nmax-num-batched-tokens: 64\n")
    config = load(
        ["--max-num-seqs", "5"], {"SWELL_MAX_NUM_SEQS": "4", "SWELL_BLOCK_SIZE": "32"}, file
    )
    assert config.scheduler.max_num_seqs == 5
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_batched_tokens == 64
    assert config.cache.enable_prefix_caching


def test_booleans_lists_and_optional_numbers_are_parsed() -> None:
    config = load(
        ["--no-enable-prefix-caching", "--served-model-name", "a", "b", "--max-model-len", "99"]
    )
    assert not config.cache.enable_prefix_caching
    assert config.model.served_model_name == ("a", "b")
    assert config.model.max_model_len == 99
    assert load([], {"SWELL_SERVED_MODEL_NAME": "x,y"}).model.served_model_name == ("x", "y")


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32")])
def test_dtypes_accept_vllm_names(name: str, dtype: str) -> None:
    assert load(["--dtype", name]).model.dtype == dtype
    assert load([], {"SWELL_DTYPE": name}).model.dtype == dtype


def test_an_empty_variable_counts_as_absent() -> None:
    assert load([], {"SWELL_MODEL": ""}).model.model


@pytest.mark.parametrize(
    ("argv", "environment", "named"),
    [
        (["--max-num-seqs", "0"], {}, "--max-num-seqs"),
        (["--max-num-seqs", "many"], {}, "--max-num-seqs"),
        (["--dtype", "int3"], {}, "--dtype"),
        ([], {"SWELL_BLOCK_SIZE": "-1"}, "SWELL_BLOCK_SIZE"),
        (["--prompt-lookup-min", "5", "--prompt-lookup-max", "3"], {}, "^prompt_lookup_min is 5"),
    ],
)
def test_invalid_value_is_refused_by_name_of_its_source(
    argv: list[str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        load(argv, environment)


@pytest.mark.parametrize("text", ["nonsense: 1\n", "- a\n", "a: [\n", b"\xff\xfem"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "swell.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match="--config"):
        load([], {}, file)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max-num-seq", ": did you mean max-num-seqs[?]$"),
        ("blocksize", ": did you mean block-size[?]$"),
        ("nonsense", "unknown setting nonsense$"),
    ],
)
def test_a_misspelt_key_of_a_file_gets_a_suggestion(tmp_path: Path, key: str, meant: str) -> None:
    file = tmp_path / "swell.yaml"
    file.write_text(f"{key}: 1\n")
    with pytest.raises(SettingsError, match=meant):
        load([], {}, file)


def test_misspelt_variable_is_reported_and_foreign_one_is_not() -> None:
    environment = ["SWELL_MAX_NUM_SEQ", "SWELL_BLOCK_SIZE", "SWELL_SERVICE_HOST", "MAX_NUM_SEQ"]
    told = list(settings.misspelt_variables(environment, settings.settings_of(EngineConfig)))
    assert told == [
        "the variable SWELL_MAX_NUM_SEQ is no setting: did you mean SWELL_MAX_NUM_SEQS?"
    ]


def test_json_setting_can_be_a_mapping_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "swell.yaml"
    file.write_text("override-generation-config:\n  temperature: 0.2\n  stop: [a, b]\n")
    text = load([], {}, file).model.override_generation_config
    assert json.loads(text) == {"temperature": 0.2, "stop": ["a", "b"]}


@pytest.mark.parametrize("config_type", [EngineConfig, FrontEndConfig, ServeConfig])
def test_every_setting_has_a_help_text_and_one_name(config_type: type) -> None:
    every = list(settings.settings_of(config_type))
    assert all(setting.help.endswith(".") for setting in every)
    assert len({setting.name for setting in every}) == len(every)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4GiB", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("4Gi", 4 << 30),
        ("4GB", 4 * 10**9),
        ("32k", 32_000),
        ("32K", 32_768),
        ("500 MB", 500 * 10**6),
        ("17", 17),
    ],
)
def test_sizes_can_have_units(tmp_path: Path, text: str, number: int) -> None:
    assert load(["--kv-cache-memory-bytes", text]).cache.kv_cache_memory_bytes == number
    variable = {"SWELL_KV_CACHE_MEMORY_BYTES": text}
    assert load([], variable).cache.kv_cache_memory_bytes == number
    file = tmp_path / "swell.yaml"
    file.write_text(f"kv-cache-memory-bytes: {text}\n")
    assert load([], file=file).cache.kv_cache_memory_bytes == number


@pytest.mark.parametrize("text", ["4GiBs", "GiB", "-4GiB", "4X", "4 G i B"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--kv-cache-memory-bytes"):
        load([f"--kv-cache-memory-bytes={text}"])


def test_setting_accepts_plugin_names_but_no_other_unknown_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "swell.admission_policies", tidal="anywhere:Tidal")
    monkeypatch.syspath_prepend(tmp_path)
    assert load(["--admission-policy", "tidal"]).scheduler.admission_policy == "tidal"
    wrong = "--admission-policy: 'tidel' is none of none, balance, cadence, level, tidal"
    with pytest.raises(SettingsError, match=wrong):
        load(["--admission-policy", "tidel"])
