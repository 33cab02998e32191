"""The settings of `swell serve` that each kind of process receives."""

from pathlib import Path

from engine.shared import settings
from scripts.write_docs import SETTINGS_HEADER
from server.config import FrontEndConfig, HttpConfig, ServeConfig, StoreConfig, TenantConfig


def test_front_ends_get_all_their_settings() -> None:
    store, http = StoreConfig(response_store="none"), HttpConfig(port=1234)
    given = ServeConfig(store=store, http=http).front_end()
    assert (given.store, given.http) == (store, http)
    everything = ServeConfig()
    for name in set(FrontEndConfig.__struct_fields__) - {"tenants"}:
        assert getattr(everything.front_end(), name) is getattr(everything, name)
    assert given.tenants == TenantConfig(allow_priority=False), "what follows from the policy"


def test_database_name_in_logs_hides_credentials() -> None:
    store = StoreConfig(response_store="postgresql://me:secret@host/db")
    assert store.is_postgres
    assert "secret" not in repr(store)
    assert not StoreConfig(response_store="/var/lib/swell/responses.sqlite").is_postgres


def test_example_config_file_is_valid(tmp_path: Path) -> None:
    example = tmp_path / "serve.yaml"
    example.write_text(SETTINGS_HEADER.split("```yaml\n")[1].split("```")[0])
    config = settings.load(ServeConfig, {}, {}, example)
    assert config.model.served_model_name == ("qwen", "default")
    assert config.model.max_model_len == 16384
    assert config.cache.kv_cache_memory_bytes == 8 << 30
    assert config.http.port == 8080
