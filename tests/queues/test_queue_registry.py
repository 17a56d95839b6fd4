"""The registry and the limits: what they accept, and what they say to the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.errors import ConfigError, UsageError
from polybus.queues import QueueLimits, Registry


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("places.toml", '[brokers.server]\nhost = "10.0.0.5"\n[brokers.server.ports]\n1 = 4001\n'),
        ("places.json", '{"brokers": {"server": {"host": "10.0.0.5", "ports": {"1": 4001}}}}'),
    ],
)
def test_a_file_says_where_brokers_are(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    registry = Registry.load(tmp_path / name)
    assert registry.address("server", 1) == ("10.0.0.5", 4001)
    assert registry.address("server", 2) is None
    assert registry.address("nobody", 1) is None


def test_without_ports_each_port_is_the_tcp_port_of_its_number() -> None:
    registry = Registry()
    registry.add("server", "10.0.0.5")
    assert registry.address("server", 4001) == ("10.0.0.5", 4001)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"brokers": {"s": {"hots": "x"}}}', "hots"),
        ('{"brokers": {"s": {"ports": {"1": "x"}}}}', "ports"),
        ('{"brokers": {"s": {"ports": {"1": 70000}}}}', "70000"),
        ('{"brokers": ', "places.json"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "places.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        Registry.load(tmp_path / "places.json")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        Registry.load(tmp_path / "none.toml")


def test_a_limit_is_more_than_nothing_and_a_length_fits_its_field() -> None:
    with pytest.raises(UsageError, match="ring_bytes"):
        QueueLimits(ring_bytes=0)
    with pytest.raises(UsageError, match="message_bytes_max"):
        QueueLimits(message_bytes_max=1 << 31)
