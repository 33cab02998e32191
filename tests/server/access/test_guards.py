"""Keys, web origins, admin endpoints, sizes and times."""

import logging
import ssl
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute

from engine.shared.fair_threads import tenant_id
from engine.shared.messages import ClusterView, EngineEntry, EngineSetup, EngineStats, RequestOutput
from engine.shared.settings import load
from server.access.guards import BadGuards, Keys, keys_for, tls_options
from server.api.admin import endpoint, operators, trainer, weights
from server.config import FrontEndConfig, GuardConfig, ServeConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import tiny
from tests.support.certificates import make_certificate

SECRETS = ("first-secret", "second-secret")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guards() -> GuardConfig:
    return GuardConfig(
        api_key=SECRETS, admin_key="root-secret", allowed_origins=("https://app.example",)
    )


@pytest.fixture
def config(guards: GuardConfig) -> FrontEndConfig:
    return tiny(
        guards=guards,
    )


class TestKeys:
    def test_thread_work_of_a_request_counts_for_its_key(
        self, http: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        encode = ServedTokenizer.encode

        def encode_and_note(self: ServedTokenizer, text: str, **options: bool) -> list[int]:
            seen.append(tenant_id.get())
            return encode(self, text, **options)

        monkeypatch.setattr(ServedTokenizer, "encode", encode_and_note)
        for key in (SECRETS[0], SECRETS[0], SECRETS[1]):
            body = {"prompt": "word " * 20_000}
            assert http.post("/tokenize", body, headers=bearer(key)).status_code == 200
        assert seen[0] == seen[1] != seen[2]
        assert 0 not in seen

    @pytest.mark.parametrize("key", SECRETS)
    def test_any_configured_key_grants_access(self, http: Any, key: str) -> None:
        assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        answer = http.post("/v1/completions", {"prompt": "x"}, headers=bearer(key))
        assert answer.status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [{}, bearer("wrong"), bearer(""), bearer("root-secret"), {"Authorization": SECRETS[0]}],
    )
    def test_without_a_key_the_api_answers_as_openai_does(
        self, http: Any, engines: Any, headers: dict[str, str]
    ) -> None:
        for answer in (
            http.get("/v1/models", headers=headers),
            http.get("/v1/nowhere", headers=headers),
            http.post("/v1/completions", {"prompt": "x"}, headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "invalid_request_error"
            _, _, sent = headers.get("Authorization", "").partition("Bearer ")
            assert ("No API key" in error["message"]) is (not sent)
        assert engines.streams == []

    def test_probes_need_no_key(self, http: Any) -> None:
        for path in ("/health", "/ready", "/version"):
            assert http.get(path).status_code == 200

    def test_refusals_are_counted(self, http: Any) -> None:
        http.get("/v1/models")
        http.get("/anything/else")
        text = http.get("/metrics", headers=bearer(SECRETS[0])).text
        assert 'endpoint="/v1/*",model_name="tiny",status="401"} 1.0' in text
        assert 'endpoint="/*",model_name="tiny",status="401"} 1.0' in text


SHOWN = {
    "open_status": ("/status.json",),
    "open_docs": ("/docs", "/openapi.json"),
    "open_metrics": ("/metrics",),
}
ALL_SHOWN = [path for paths in SHOWN.values() for path in paths]


class TestPublicPaths:
    def test_hosts_and_load_are_not_shown_without_a_key(self, http: Any) -> None:
        for path in ALL_SHOWN:
            for headers in ({}, bearer("wrong"), {"Authorization": SECRETS[0]}):
                assert http.get(path, headers=headers).status_code == 401
            # Repeated expensive requests are delayed, so send only one.
            is_work = path in ("/metrics", "/openapi.json")
            for key in SECRETS[1:] if is_work else (*SECRETS, "root-secret"):
                assert http.get(path, headers=bearer(key)).status_code == 200
        assert http.get("/metrics/engine/0").status_code == 401

    def test_tokens_are_not_counted_without_a_key(self, http: Any) -> None:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [70]})):
            assert http.post(path, body).status_code == 401
            assert http.post(path, body, headers=bearer("root-secret")).status_code == 401
            assert http.post(path, body, headers=bearer(SECRETS[1])).status_code == 200

    def test_unknown_paths_need_a_key(self, http: Any) -> None:
        for path in ("/nowhere", "/redoc", "/Metrics", "/metrics%2f", "/status.json/"):
            assert http.get(path).status_code == 401

    def test_login_page_is_open_and_contains_no_data(self, http: Any) -> None:
        for path in ("/", "/status.js", "/status.css"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert "tiny" not in answer.text

    @pytest.mark.parametrize("flag", SHOWN)
    def test_each_flag_opens_its_paths(
        self, flag: str, config: FrontEndConfig, http_of: Any
    ) -> None:
        guards = msgspec.structs.replace(config.guards, **{flag: True})
        http = http_of(msgspec.structs.replace(config, guards=guards))
        for path in ALL_SHOWN:
            assert http.get(path).status_code == (200 if path in SHOWN[flag] else 401)

    @pytest.mark.parametrize("flag", SHOWN)
    def test_each_flag_closes_its_paths_without_key(
        self, flag: str, config: FrontEndConfig, http_of: Any
    ) -> None:
        http = http_of(
            msgspec.structs.replace(
                config, guards=msgspec.structs.replace(GuardConfig(), **{flag: False})
            )
        )
        for path in ALL_SHOWN:
            assert http.get(path).status_code == (404 if path in SHOWN[flag] else 200)
        assert http.get("/").status_code == (404 if flag == "open_status" else 200)
        assert http.post("/v1/completions", {"prompt": "x"}).status_code == 200

    def test_metrics_key_grants_access_only_to_metrics(
        self, config: FrontEndConfig, http_of: Any
    ) -> None:
        guards = msgspec.structs.replace(config.guards, metrics_key="scrape")
        http = http_of(msgspec.structs.replace(config, guards=guards))
        assert http.get("/metrics", headers=bearer("scrape")).status_code == 200
        for path in ("/status.json", "/openapi.json", "/v1/models"):
            assert http.get(path, headers=bearer("scrape")).status_code == 401
        assert http.get("/admin/engines", headers=bearer("scrape")).status_code == 403


class TestAdmin:
    @pytest.mark.parametrize(
        ("path", "method"),
        [
            (route.path, next(iter(route.methods or ())))
            for router in (
                endpoint.router, operators.router, trainer.router, weights.router
            )
            for route in router.routes
            if isinstance(route, APIRoute)
        ],
    )  # fmt: skip
    def test_operator_paths_refuse_other_keys(
        self, http: Any, engines: Any, path: str, method: str
    ) -> None:
        for headers in ({}, bearer("wrong"), bearer(SECRETS[0])):
            answer = http.request(method, path, headers=headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "admin_key_required"
        assert engines.utilities == []

    def test_the_prefix_cache_is_reset_in_one_engine_or_all(self, http: Any, engines: Any) -> None:
        headers = bearer("root-secret")
        answer = http.request("POST", "/admin/reset-prefix-cache", headers=headers)
        assert [each["rank"] for each in answer.json()["answers"]] == [0, 1]
        assert answer.json()["answers"][0]["result"] == {"blocks_forgotten": 7}
        http.request("POST", "/admin/reset-prefix-cache?rank=1", headers=headers)
        assert engines.utilities == [
            (None, "reset_prefix_cache", {}),
            (1, "reset_prefix_cache", {}),
        ]

    def test_any_utility_can_be_called(self, http: Any, engines: Any) -> None:
        headers = bearer("root-secret")
        body = {"name": "sleep", "arguments": {"level": 1}, "rank": 0}
        assert http.post("/admin/utilities", body, headers=headers).status_code == 200
        assert engines.utilities == [(0, "sleep", {"level": 1})]
        refused = http.post("/admin/utilities", {"name": "unknown"}, headers=headers)
        assert refused.status_code == 400
        assert "no utility" in refused.json()["error"]["message"]

    def test_engines_are_listed_with_state_and_load(self, http: Any, engines: Any) -> None:
        headers = bearer("root-secret")
        assert http.get("/admin/engines", headers=headers).json()["engines"] == []
        stats = EngineStats(
            rank=0, incarnation=9, version=1, wave=3, step=5, waiting=2, running=4,
            kv_usage=0.5, queued_prefill_tokens=70,
        )  # fmt: skip
        setup = EngineSetup(100, 16, 512, "f", 128)
        engines.view = ClusterView(
            1, 1, 3, True,
            [EngineEntry(1, 8, False, "b", 2, None, None),
             EngineEntry(0, 9, True, "a", 0, setup, stats)],
            num_front_ends=2,
        )  # fmt: skip
        engines.stats_age = {0: 0.25}
        body = http.get("/admin/engines", headers=headers).json()
        assert (body["wave"], body["running"], body["num_front_ends"]) == (3, True, 2)
        first, second = body["engines"]
        assert (first["rank"], first["waiting"], first["running"]) == (0, 2, 4)
        assert (first["max_num_seqs"], first["stats_age"]) == (128, 0.25)
        assert (second["ready"], second["restarts"], second["stats_age"]) == (False, 2, None)


class TestWithoutKeys:
    @pytest.fixture
    def guards(self) -> GuardConfig:
        return GuardConfig()

    def test_api_is_open_and_admin_endpoints_are_absent_without_keys(self, http: Any) -> None:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/admin/engines").status_code == 404
        assert not [
            path for path in http.get("/openapi.json").json()["paths"] if path.startswith("/admin")
        ]

    def test_pages_of_other_origins_are_refused(self, http: Any) -> None:
        answer = http.get("/v1/models", headers={"Origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers


class TestOrigins:
    def test_allowed_origins_can_read_responses_and_errors(self, http: Any) -> None:
        origin = {"Origin": "https://app.example"}
        asked = http.request(
            "OPTIONS",
            "/v1/completions",
            headers={**origin, "Access-Control-Request-Method": "POST"},
        )
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        refused = http.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"

    def test_other_origins_get_no_cors_headers(self, http: Any) -> None:
        headers = {"Origin": "https://evil.example", **bearer(SECRETS[0])}
        answer = http.get("/v1/models", headers=headers)
        assert "access-control-allow-origin" not in answer.headers


class TestSizesAndTimes:
    @pytest.fixture
    def guards(self) -> GuardConfig:
        return GuardConfig(max_body_bytes=1024, request_timeout=3.0)

    def test_body_size_is_limited(self, http: Any) -> None:
        answer = http.post("/v1/completions", {"prompt": "x" * 2000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

    def test_a_request_that_takes_too_long_is_ended(
        self, http_of: Any, config: FrontEndConfig, engines: Any
    ) -> None:
        engines.script = lambda stream: []
        http = http_of(msgspec.structs.replace(config, guards=GuardConfig(request_timeout=0.05)))
        answer = http.post("/v1/completions", {"prompt": "x"})
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "request_timeout"
        assert engines.streams[0].closed.is_set()

    def test_a_stream_that_takes_too_long_ends_with_an_error_event(
        self, http: Any, engines: Any
    ) -> None:
        engines.script = lambda stream: [RequestOutput(1, [70])]
        *chunks, error = http.stream("/v1/completions", {"prompt": "x"})
        assert chunks[0]["choices"]
        assert error["error"]["code"] == "request_timeout"
        assert engines.streams[0].closed.is_set()


class TestConfiguration:
    def test_keys_come_from_flags_a_file_and_the_environment(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# for the team\nfrom-file\n\n  padded  \n")
        config = load(ServeConfig, {"api_key_file": str(file)}, {"SWELL_API_KEY": "a,b"})
        keys = keys_for("api", config.guards)
        for key in (b"a", b"b", b"from-file", b"padded"):
            assert key in keys
        assert b"# for the team" not in keys
        assert b"" not in keys
        assert not keys_for("admin", config.guards)

    @pytest.mark.parametrize("content", [None, "", "# nothing\n\n"])
    def test_a_file_without_a_key_is_an_error(self, tmp_path: Path, content: str | None) -> None:
        file = tmp_path / "keys"
        if content is not None:
            file.write_text(content)
        with pytest.raises(BadGuards, match="api-key-file"):
            keys_for("api", GuardConfig(api_key_file=str(file)))

    def test_an_empty_key_is_an_error(self) -> None:
        with pytest.raises(BadGuards):
            keys_for("api", GuardConfig(api_key=("",)))

    def test_secrets_are_not_shown(self, guards: GuardConfig) -> None:
        config = ServeConfig(guards=guards)
        for text in (repr(config), str(config.front_end()), repr(Keys(SECRETS))):
            assert "secret" not in text

    def test_engines_and_coordinator_get_no_secrets(self, guards: GuardConfig) -> None:
        config = ServeConfig(guards=guards)
        for part in (config.engine(), config.coordinator()):
            assert b"secret" not in msgspec.msgpack.encode(part)

    def test_secrets_are_not_logged(self, http: Any, caplog: Any) -> None:
        caplog.set_level(logging.DEBUG)
        http.get("/v1/models", headers=bearer(SECRETS[0]))
        http.get("/v1/models", headers=bearer("mistyped-secret"))
        assert "secret" not in caplog.text

    def test_tls_needs_existing_files(self, tmp_path: Path) -> None:
        certificate = tmp_path / "cert.pem"
        with pytest.raises(BadGuards, match="ssl-certfile"):
            tls_options(GuardConfig(ssl_certfile=str(certificate)))
        certificate.touch()
        with pytest.raises(BadGuards, match="need --ssl-certfile"):
            tls_options(GuardConfig(ssl_keyfile=str(certificate)))
        with pytest.raises(BadGuards, match=r"^--ssl-certfile .*cert.pem cannot be used"):
            tls_options(GuardConfig(ssl_certfile=str(certificate)))
        key = tmp_path / "key.pem"
        make_certificate(certificate, key)
        certificate.write_text(certificate.read_text() + key.read_text())
        locked = ["-aes128", "-passout", "pass:secret", "-out", str(key)]
        subprocess.run(["openssl", "ec", "-in", str(certificate), *locked], check=True)
        with pytest.raises(BadGuards, match="without a password"):
            tls_options(GuardConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
        key.write_text("nonsense")
        with pytest.raises(BadGuards, match=r"and --ssl-keyfile .*key.pem cannot be used"):
            tls_options(GuardConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
        with pytest.raises(BadGuards, match=r"^--ssl-ca-certs .*key.pem cannot be used"):
            tls_options(GuardConfig(ssl_certfile=str(certificate), ssl_ca_certs=str(key)))
        options = tls_options(
            GuardConfig(ssl_certfile=str(certificate), ssl_ca_certs=str(certificate))
        )
        assert options["ssl_cert_reqs"] == ssl.CERT_REQUIRED
        assert tls_options(GuardConfig()) == {}
