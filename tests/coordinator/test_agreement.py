"""Who may be in one cluster, and who is sent away."""

from pathlib import Path

import pytest

from coordinator.events import Action, FromMember, PublishOrder, Reply
from coordinator.state import CoordinatorParameters, CoordinatorState
from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.group_config import MODEL_KEYS, group_config, model_identity, stated_in
from engine.shared.messages import (
    FrontEndAddresses,
    FrontEnds,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refused,
    Welcome,
)
from engine.shared.version import PROTOCOL_VERSION

MODEL = {
    "model": "m",
    "revision": "default",
    "tokenizer": "aaaa",
    "runner": "generate",
    "pooler_config": "{}",
}
ENGINE = {**MODEL, "dtype": "float32"}


class Cluster:
    """A coordinator's state, and what it answers."""

    def __init__(self) -> None:
        parameters = CoordinatorParameters(
            epoch=7, front_publish="", back_publish="", back_output="", publish_interval=0.1,
            publish_idle_interval=3.0, member_timeout=5.0,
        )  # fmt: skip
        self.state = CoordinatorState(parameters)
        self.listed: list[int] = []

    def send(self, message: object) -> object:
        actions: list[Action] = self.state.handle(FromMember(b"x", message), 1.0)  # type: ignore[arg-type]
        for action in actions:
            if isinstance(action, PublishOrder) and isinstance(action.order, FrontEnds):
                self.listed = [entry.index for entry in action.order.front_ends]
        replies = [action.message for action in actions if isinstance(action, Reply)]
        return replies[0] if replies else None

    def engine(
        self, rank: int, settings: dict[str, str], protocol: int = PROTOCOL_VERSION
    ) -> object:
        return self.send(Hello("engine", rank, rank + 10, "h", 1, settings, protocol=protocol))

    def front_end(
        self, index: int, settings: dict[str, str], protocol: int = PROTOCOL_VERSION
    ) -> object:
        addresses = FrontEndAddresses("r", "o")
        return self.send(
            Hello(
                "front_end", index, index + 50, "h", 1, settings, addresses, protocol=protocol,
                version="9.9",
            )
        )  # fmt: skip


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_front_end_of_other_model_is_refused_with_field_and_values(
    cluster: Cluster, key: str
) -> None:
    cluster.engine(0, ENGINE)
    refused = cluster.front_end(0, {**MODEL, key: "other"})
    assert isinstance(refused, Refused)
    assert (refused.field, refused.final) == (key, True)
    assert f"{key} is 'other' here but {MODEL[key]!r} on engine 0" in refused.reason
    assert isinstance(cluster.front_end(0, MODEL), Welcome)


def test_front_end_without_model_identity_is_refused(cluster: Cluster) -> None:
    cluster.engine(0, ENGINE)
    assert isinstance(cluster.front_end(0, {}), Refused)


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1])
def test_a_process_of_another_protocol_is_refused_with_both_versions(
    cluster: Cluster, protocol: int
) -> None:
    reasons = []
    for refused in (cluster.engine(0, ENGINE, protocol), cluster.front_end(0, MODEL, protocol)):
        assert isinstance(refused, Refused)
        assert refused.field == "protocol"
        spoken = f"{PROTOCOL_VERSION} or {PROTOCOL_VERSION - 1}"
        assert f"but {spoken} at the coordinator" in refused.reason
        reasons.append(refused.reason)
    assert "Swell 9.9" in reasons[-1]
    assert isinstance(cluster.engine(0, ENGINE), Welcome)


def test_processes_of_previous_protocol_join_with_it(cluster: Cluster) -> None:
    before = PROTOCOL_VERSION - 1
    for welcome in (cluster.engine(0, ENGINE, before), cluster.front_end(0, MODEL, before)):
        assert isinstance(welcome, Welcome)
        assert welcome.protocol == before, "an older process insists on its own"
    welcome = cluster.engine(1, ENGINE)
    assert isinstance(welcome, Welcome)
    assert welcome.protocol == PROTOCOL_VERSION
    assert [each.protocol for each in welcome.front_ends] == [before]


def test_front_ends_without_engines_are_all_accepted(cluster: Cluster) -> None:
    assert isinstance(cluster.front_end(0, MODEL), Welcome)
    assert isinstance(cluster.front_end(1, {**MODEL, "model": "n"}), Welcome)


def test_first_engine_decides_despite_front_ends_of_other_model(
    cluster: Cluster,
) -> None:
    cluster.front_end(0, MODEL)
    cluster.front_end(1, {**MODEL, "tokenizer": "bbbb"})
    welcome = cluster.engine(0, {**ENGINE, "tokenizer": "bbbb"})
    assert isinstance(welcome, Welcome)
    assert [entry.index for entry in welcome.front_ends] == [1]
    assert cluster.listed == [1]
    ack = cluster.send(Heartbeat("front_end", 0, 50))
    assert ack == HeartbeatAck(7, known=False)
    assert isinstance(cluster.front_end(0, MODEL), Refused)


def test_refused_front_end_joins_when_engines_of_its_model_return(
    cluster: Cluster,
) -> None:
    cluster.front_end(0, MODEL)
    cluster.engine(0, {**ENGINE, "model": "n"})
    assert isinstance(cluster.front_end(0, MODEL), Refused)
    cluster.send(Goodbye("engine", 0, 10))
    assert isinstance(cluster.front_end(0, MODEL), Welcome)
    assert isinstance(cluster.engine(0, ENGINE), Welcome)
    assert cluster.listed == [0]


def test_engines_and_front_ends_read_the_same_tokenizer_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    settings = ModelConfig(model=str(model))
    stated = model_identity(settings)
    assert stated.items() <= group_config(EngineConfig(model=settings)).items()
    assert set(stated) == set(MODEL_KEYS)
    (model / "tokenizer.json").write_text("{ }")
    assert model_identity(settings)["tokenizer"] != stated["tokenizer"]
    revised = ModelConfig(model=f"{model}/", revision="v2")
    assert model_identity(revised)["model"] == "model"
    assert model_identity(revised)["revision"] == "v2"


def test_model_task_is_compared_however_it_was_configured(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["Qwen3Model"], "hidden_size": 8}')
    found, said = (
        ModelConfig(model=str(tmp_path)),
        ModelConfig(model=str(tmp_path), runner="pooling"),
    )
    assert model_identity(found) == model_identity(said)
    config.write_text('{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}')
    assert model_identity(found)["runner"] == "generate"
    assert model_identity(said)["runner"] == "pooling"


LOCKSTEP = {
    **ENGINE, "lockstep": "true", "data_parallel_size": "2", "tensor_parallel_size": "2",
    "pipeline_parallel_size": "1", "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size", "device"])
def test_engine_with_incompatible_group_setting_is_refused_by_name(
    cluster: Cluster, key: str
) -> None:
    cluster.engine(0, LOCKSTEP)
    refused = cluster.engine(1, {**LOCKSTEP, key: "other"})
    assert isinstance(refused, Refused)
    assert (refused.field, refused.final) == (key, True)
    settings = EngineConfig()
    assert key in group_config(settings, lockstep=True)
    assert key not in group_config(settings), "engines that step alone may differ"


def test_engine_of_previous_protocol_need_not_state_new_settings(
    cluster: Cluster,
) -> None:
    cluster.engine(0, LOCKSTEP)
    older = stated_in(LOCKSTEP, PROTOCOL_VERSION - 1)
    assert older.keys() < LOCKSTEP.keys()
    assert isinstance(cluster.engine(1, older, PROTOCOL_VERSION - 1), Welcome)
    refused = cluster.engine(2, older)
    assert isinstance(refused, Refused)
    assert refused.field == "device"


def test_growing_group_accepts_engines_started_with_other_size(cluster: Cluster) -> None:
    cluster.engine(0, LOCKSTEP)
    assert isinstance(cluster.engine(1, {**LOCKSTEP, "data_parallel_size": "3"}), Welcome)
