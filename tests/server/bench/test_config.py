from server.bench.config import TargetConfig


def test_address_has_two_flags() -> None:
    assert TargetConfig(url="http://a").address == "http://a"
    assert TargetConfig(url="http://a", base_url="http://b").address == "http://b"
