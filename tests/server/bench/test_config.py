from server.bench.config import TargetConfig


def test_the_address_goes_by_two_names() -> None:
    assert TargetConfig(url="http://a").address == "http://a"
    assert TargetConfig(url="http://a", base_url="http://b").address == "http://b"
