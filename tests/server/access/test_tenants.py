"""The tenant of a request, its permissions, and which cached prompts it can use."""

from pathlib import Path
from typing import Any

import pytest

from engine.shared.config import SchedulerConfig
from server.access.guards import keys_for
from server.access.tenants import EVERYBODY, Tenancy, named_tenant
from server.config import FrontEndConfig, GuardConfig, ServeConfig, TenantConfig
from tests.server.conftest import tiny

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def config_of(*keys: str, **tenants: Any) -> FrontEndConfig:
    return tiny(
        guards=GuardConfig(api_key=keys),
        tenants=TenantConfig(**tenants),
    )


def tenancy(*keys: str, **tenants: Any) -> Tenancy:
    return Tenancy(config_of(*keys, **tenants))


class TestTenantOfRequest:
    def test_every_key_is_a_tenant_and_equal_names_share_one(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# ours\nbatch: old-secret\nbatch: new-secret\nplain-secret\na:b\n")
        keys = keys_for("api", GuardConfig(api_key=("given",), api_key_file=str(file)))
        old, new, plain, given, colon = (
            keys.owner(secret)
            for secret in (b"old-secret", b"new-secret", b"plain-secret", b"given", b"a:b")
        )
        assert old is not None
        assert old == new
        assert old.name == "batch"
        assert keys.num_tenants == 4
        assert len({each.id for each in (old, plain, given, colon) if each}) == 4
        assert sorted(each.slot for each in (old, plain, given, colon) if each) == [0, 1, 2, 3]
        assert keys.owner(b"batch: old-secret") is None
        assert keys.owner(b"") is None

    def test_tenants_are_the_same_in_every_front_end(self) -> None:
        here = keys_for("api", GuardConfig(api_key=("a", "b"))).owner(b"a")
        there = keys_for("api", GuardConfig(api_key=("b", "a"))).owner(b"a")
        assert here is not None
        assert there is not None
        assert (here.id, here.slot) == (there.id, there.slot)
        assert named_tenant("batch").id == 6550455121904559123

    def test_tenant_name_reveals_neither_key_nor_digest(self) -> None:
        owner = keys_for("api", GuardConfig(api_key=("first", "secret"))).owner(b"secret")
        assert owner is not None
        assert owner.name == "key-2", "who knows a digest can try keys until one fits"

    def test_users_are_distinguished_only_if_the_operator_enables_it(self) -> None:
        key = named_tenant("gateway")
        assert tenancy("k").tenant(key, "ann") == key
        by_user = tenancy("k", tenant_by="user")
        ann, bob = by_user.tenant(key, "ann"), by_user.tenant(key, "bob")
        assert len({ann.id, bob.id, key.id}) == 3
        assert by_user.tenant(key, None) == key
        assert by_user.tenant(named_tenant("other"), "ann").id != ann.id
        assert ann.slot != bob.slot

    def test_engines_get_the_tenant_of_a_request(
        self, app: Any, http: Any, engines: Any, config: FrontEndConfig
    ) -> None:
        http.complete()
        assert engines.streams[-1].tenant == EVERYBODY.id


class TestOverHttp:
    @pytest.fixture
    def config(self) -> FrontEndConfig:
        return config_of("ann", "bob")

    def test_engines_get_the_key_of_a_request(self, http: Any, engines: Any) -> None:
        for key in ("ann", "bob", "ann"):
            body = {"prompt": "x", "n": 2}
            assert http.post("/v1/completions", body, headers=bearer(key)).status_code == 200
        seen = [stream.tenant for stream in engines.streams]
        assert seen[:2] == seen[4:]
        assert len(set(seen)) == 2
        assert EVERYBODY.id not in seen


class TestAllowances:
    @pytest.mark.parametrize(
        ("keys", "policy", "wish", "allowed"),
        [
            ((), "priority", None, True),
            ((), "fcfs", None, False),
            (("k",), "priority", None, False),
            (("k",), "priority", True, True),
            ((), "priority", False, False),
        ],
    )
    def test_priorities_need_the_priority_policy_and_permission(
        self, keys: tuple[str, ...], policy: Any, wish: bool | None, allowed: bool
    ) -> None:
        node = ServeConfig(
            guards=GuardConfig(api_key=keys),
            scheduler=SchedulerConfig(scheduling_policy=policy),
            tenants=TenantConfig(allow_priority=wish),
        )
        assert node.front_end().allows_priority is allowed

    def test_priorities_are_not_allowed_where_they_would_be_ignored(self) -> None:
        with pytest.raises(ValueError, match="scheduling_policy"):
            ServeConfig(tenants=TenantConfig(allow_priority=True))


class TestCachedPrompts:
    def test_isolated_tenants_find_only_their_own_prefixes(self) -> None:
        ann, bob = named_tenant("ann"), named_tenant("bob")
        shared, isolated = tenancy(), tenancy(prefix_cache_isolation="tenant")
        assert shared.cache_root(ann, None) == b""
        assert shared.cache_root(ann, "salt") == shared.cache_root(bob, "salt")
        roots = [isolated.cache_root(each, salt) for each in (ann, bob) for salt in (None, "salt")]
        assert len({*roots, b"", shared.cache_root(ann, "salt")}) == 6

    def test_no_salt_gives_access_to_cache_of_isolated_tenant(self) -> None:
        ann = named_tenant("ann")
        own = tenancy(prefix_cache_isolation="tenant").cache_root(ann, None)
        guesses = (str(ann.id), f"{ann.id}", f"{ann.id}0:", f"5:cache19:{ann.id}0:", "ann")
        assert own not in {tenancy().cache_root(EVERYBODY, guess) for guess in guesses}
