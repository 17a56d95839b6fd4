"""Settings: what loads, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polybus import config, config_file
from polybus.errors import ConfigError

SERVER_JSON = """{
  "topic-config":"path/to/topics.json",
  "connectors":[
    {
      "protocoll":"tcp",
      "ip":"127.0.0.1",
      "port":55545
    }
  ]
}"""
TOPICS_JSON = """{
  "topics":[
    "technology",
    "goms",
    "golang"
  ]
}"""


def loaded(folder: Path, raw: Any, **environ: str) -> config.Config:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return config_file.load(path, environ)


def refusal(folder: Path, raw: Any, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, raw, **environ)
    assert "\n" not in caught.value.text
    return caught.value.text


def test_the_goms_files_load_unchanged(tmp_path: Path) -> None:
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/topics.json").write_text(TOPICS_JSON)
    (tmp_path / "server.json").write_text(SERVER_JSON)
    found = config_file.load(tmp_path / "server.json", {})
    assert [topic.name for topic in found.topic_list()] == ["technology", "goms", "golang"]
    [connector] = found.connectors
    assert (connector.protocol, connector.ip, connector.port) == ("tcp", "127.0.0.1", 55545)
    assert connector.protocols == ("goms", "boson-frames", "boson-properties", "http")


def test_without_a_file_the_bus_listens_on_its_port_over_tcp_and_udp() -> None:
    found = config_file.load(None, {})
    assert [(one.protocol, one.ip, one.port) for one in found.connectors] == [
        ("tcp", "127.0.0.1", 55545),
        ("udp", "127.0.0.1", 55545),
    ]
    assert found.durability == "fsync"


def test_toml_and_json_mean_the_same(tmp_path: Path) -> None:
    toml = tmp_path / "config.toml"
    toml.write_text('durability = "interval"\ntopics = ["A"]\n[limits]\njson-depth-max = 9\n')
    raw = {"durability": "interval", "topics": ["A"], "limits": {"json-depth-max": 9}}
    assert config_file.load(toml, {}) == loaded(tmp_path, raw)


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        {"durability": "memory"},
        POLYBUS_DURABILITY="interval",
        POLYBUS_LIMITS__OUTBOX_BYTES_MAX="1048576",
    )
    assert found.durability == "interval"
    assert found.limits.outbox_bytes_max == 1 << 20


def test_topics_are_lowercased_and_declared_once(tmp_path: Path) -> None:
    found = loaded(tmp_path, {"topics": ["News", "news", {"name": "SPORT"}]})
    assert [topic.name for topic in found.topic_list()] == ["news", "sport"]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"durabilty": "fsync"}, "durabilty"),
        ({"limits": {"outbox": 1}}, "outbox"),
        ({"durability": "never"}, "durability"),
        ({"limits": {"outbox-bytes-max": 0}}, "limits.outbox-bytes-max"),
        ({"limits": {"udp-idle-s": -1}}, "limits.udp-idle-s"),
        ({"topics": ["$own"]}, "$own"),
        ({"topics": ["*"]}, "topics"),
        ({"topics": ["a?receipt=1"]}, "topics"),
        ({"topics": [" a"]}, "topics"),
        ({"topics": 5}, "topics"),
        ({"http": {"hosts": ["bus.example:80"]}}, "http.hosts"),
        ({"http": {"hosts": ["https://bus.example"]}}, "http.hosts"),
        ({"http": {"hosts": [""]}}, "http.hosts"),
        ({"topics": 5, "topic-config": "topics.json"}, "topics"),
        ({"topics": [{"name": "q", "retention": {"age-s": -1}}]}, "q: retention.age-s"),
        ({"topic-config": "absent.json"}, "topic-config"),
        ({"connectors": []}, "connectors"),
        ({"connectors": [{"port": 70000}]}, "connectors[0].port"),
        ({"connectors": [{"speaks": "smtp"}]}, "connectors[0].speaks"),
        ({"connectors": [{"speaks": []}]}, "connectors[0].speaks"),
        ({"connectors": [{"topic": "a"}]}, "connectors[0].topic"),
        ({"connectors": [{"default-topic": "$x"}]}, "connectors[0].default-topic"),
        ({"connectors": [{"protocol": "tcp", "protocoll": "udp"}]}, "connectors[0]"),
        ({"connectors": [{"speaks": "queue"}]}, "connectors[0].topic"),
        ({"limits": {"message-bytes-max": 300 << 20}}, "connectors[0].speaks"),
        ({"log": "kafka://"}, "log is"),
        ({"log": "kafka://a:1,b"}, "log is"),
        ({"log": "redis://a:1"}, "log is"),
        ({"log": "kafka://a:1", "durability": "memory"}, "durability"),
        ({"log": "kafka://a:1", "cluster": {"insync-min": 4}}, "cluster.insync-min"),
        ({"log": "kafka://a:1", "cluster": {"prefix": "a b"}}, "cluster.prefix"),
        ([], "must be a JSON object"),
        ({"tables": [{"name": "orders"}]}, "tables: 'orders' needs the name"),
        (
            {"topics": [{"name": "o", "schema": "a STRUCT<b: BIGNT>"}]},
            "topics: o: schema: a.b: there is no type BIGNT; did you mean bigint",
        ),
        ({"tables": [{"name": "a.b", "expect": {"": "x"}}]}, "tables: a.b: '': use 1 to"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_the_key(
    tmp_path: Path, raw: Any, named: str
) -> None:
    (tmp_path / "topics.json").write_text(TOPICS_JSON)
    assert named in refusal(tmp_path, raw)


@pytest.mark.parametrize("number", ["nan", "inf", "1e300"])
def test_a_number_that_is_none_is_no_limit(tmp_path: Path, number: str) -> None:
    (tmp_path / "config.toml").write_text(f"[limits]\nudp-idle-s = {number}\n")
    with pytest.raises(ConfigError, match="udp-idle-s"):
        config_file.load(tmp_path / "config.toml", {})


@pytest.mark.parametrize("age", ["1e10", "10000000000", "1e300"])
def test_an_age_may_be_so_large_that_it_means_forever(tmp_path: Path, age: str) -> None:
    retention = f"[retention]\nage-s = {age}\nhold-age-s = {age}\n"
    more = f'[system]\nretention-age-s = {age}\n[[topics]]\nname = "t"\nretention.age-s = {age}\n'
    (tmp_path / "config.toml").write_text(retention + more)
    found = config_file.load(tmp_path / "config.toml", {})
    assert (found.retention.age_s, found.system.retention_age_s) == (float(age), float(age))
    (tmp_path / "config.toml").write_text("[retention]\nage-s = inf\n")
    with pytest.raises(ConfigError, match="retention.age-s is inf"):
        config_file.load(tmp_path / "config.toml", {})


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        config_file.load(tmp_path / "absent.json", {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        config_file.load(tmp_path / "broken.json", {})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.toml", "[limits]\n# x\noutbox-bytes-mx = 3\n", "c.toml:3: limits.outbox-bytes-mx"),
        ("c.toml", '[[connectors]]\nport = 1\n[[connectors]]\nprt = "x"\n', "c.toml:4: connectors"),
        ("c.toml", "[limits]\nparts-max = 1\ntopics-max = 0\n", "c.toml:3: limits.topics-max is 0"),
        ("c.json", '{"connectors":[{"port":1},\n{"prt":2}]}', "c.json:2: connectors[1].prt"),
        ("c.json", '{"limits": {\n"topics-max": "x"}}', "c.json:2: limits.topics-max: Expected"),
    ],
)
def test_a_mistake_names_file_and_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        config_file.load(tmp_path / name, {})
    assert says in caught.value.text and len(caught.value.text.splitlines()) == 1


def test_an_unknown_key_names_near_ones_and_a_variable_is_named() -> None:
    for variable, near in {
        "POLYBUS_LIMITS__OUTBOX_BYTES_MX": "outbox-bytes-max",
        "POLYBUS_LIMITZ__TOPICS_MAX": "limits",
        "POLYBUS_DURABILTY": "durability",
    }.items():
        with pytest.raises(ConfigError) as caught:
            config_file.load(None, {variable: "1"})
        assert caught.value.text.startswith(f"{variable}: ")
        assert f"did you mean {near}" in caught.value.text
