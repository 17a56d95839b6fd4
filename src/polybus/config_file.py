"""Read the settings from a TOML or JSON file and the environment, and check them.

Every error names the key, and where it was set: file and line, or the variable. Types are checked
by msgspec; `check` has what types cannot express.
"""

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, cast

import msgspec

from polybus import names
from polybus.config import (
    NOT_SETTINGS,
    Config,
    Connector,
    DeclaredTable,
    DeclaredTopic,
    Settings,
    topic_name,
)
from polybus.errors import ConfigError
from polybus.schema_ddl import columns_of
from polybus.schema_file import columns_in
from polybus.structs import convert

DETECTABLE_MESSAGE_BYTES_MAX = 256 << 20
EXPECTATIONS_MAX = 50
EXPECTATION_NAME_MAX = 100
KAFKA = "kafka://"
KAFKA_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,60}")
BROKER = re.compile(r"[^\s/,@:?#]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
HOST_NAME = re.compile(r"[^:/\[\]*\s]+|\[?[0-9A-Fa-f:.]+\]?")
_AGES = ("age_s", "hold_age_s", "retention_age_s")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_KEY = re.compile(r"[a-z][a-z0-9-]*(?:\[\d+\])?(?:\.[a-z][a-z0-9-]*)*(?=[ :.])")
_PARTS = re.compile(r"[a-z][a-z0-9-]*|\[\d+\]")
JSON_PATH = re.compile(r"\$(\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]{1,6}\])+")


def load(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file, apply the environment, and check the result; no file means defaults.

    Raises ConfigError, whose text names the key.
    """
    raw: dict[str, Any] = {}
    base = Path()
    if path is not None:
        raw = read_file(Path(path), "config")
        base = Path(path).resolve().parent
    variables = _apply_environment(raw, os.environ if environ is None else environ)
    try:
        return _checked(raw, base)
    except ConfigError as error:
        place = _place_of(error.text, path, variables)
        if not place:
            raise
        raise ConfigError(error.code, f"{place}: {error.text}") from error


def _checked(raw: dict[str, Any], base: Path) -> Config:
    _accept_old_spellings(raw)
    topic_file = raw.get("topic-config")
    if isinstance(topic_file, str):
        if not isinstance(raw.get("topics", []), list):
            raise ConfigError("config.invalid", "topics: must be a list of names or tables")
        raw["topics"] = [*raw.get("topics", []), *_read_topics(topic_file, base)]
    _read_schemas(raw.get("topics"), base)
    try:
        config = convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError("config.invalid", _say(error)) from error
    check(config)
    return config


def differences(before: Settings, after: Settings, group: str = "") -> list[str]:
    """The keys whose values differ, as `limits.outbox-bytes-max`."""
    found = []
    for field in msgspec.structs.fields(before):
        one, other = getattr(before, field.name), getattr(after, field.name)
        key = group + field.encode_name
        if isinstance(one, Settings) and isinstance(other, Settings):
            found += differences(one, other, f"{key}.")
        elif one != other:
            found.append(key)
    return found


def check(config: Config) -> None:
    """Check what types cannot express. Raises ConfigError."""
    if not config.connectors:
        raise ConfigError("config.invalid", "connectors is empty: the bus needs at least one")
    for number, connector in enumerate(config.connectors):
        key = f"connectors[{number}]"
        if not 0 <= connector.port <= 65535:
            text = f"{key}.port is {connector.port}; it must be 0 (any free port) to 65535"
            raise ConfigError("config.range", text)
        if not connector.protocols:
            raise ConfigError("config.invalid", f"{key}.speaks is empty: name a protocol")
        if connector.tls is not None and connector.protocol == "udp":
            raise ConfigError("config.invalid", f"{key}.tls: UDP cannot use TLS; remove it")
        if "queue" in connector.protocols:
            _check_queue(connector, key)
        else:
            _check_not_queue(connector, key)
        if connector.default_topic is not None:
            limit = config.limits.topic_bytes_max
            topic_name(f"{key}.default-topic", connector.default_topic, limit)
        big = config.limits.message_bytes_max > DETECTABLE_MESSAGE_BYTES_MAX
        if big and len(connector.protocols) > 1:
            text = (
                f"{key}.speaks must name one protocol while limits.message-bytes-max is over "
                "256 MiB: larger messages make the first bytes of protocols ambiguous"
            )
            raise ConfigError("config.invalid", text)
    _check_hosts(config.http.hosts)
    _check_tables(config)
    _check_log(config)
    for name in (
        "limits",
        "journal",
        "msgstream",
        "http",
        "retention",
        "system",
        "pipeline",
        "cluster",
    ):
        check_numbers(getattr(config, name), name)
    for topic in config.topic_list():
        check_numbers(topic.retention, f"topics: {topic.name}: retention")
        _check_paths(topic)
        check_schema(topic, f"topics: {topic.name}")
        _check_expectations("topics", topic)


def check_numbers(group: Settings, key: str) -> None:
    """Raises ConfigError `config.range` if a number is not positive, or no thread can wait for that
    number of seconds. Nobody waits for an age: a large one means forever.
    """
    for field in msgspec.structs.fields(group):
        value = getattr(group, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        # Not `<= 0`: TOML has NaN.
        if not value > 0:
            text = f"{key}.{field.encode_name} is {value}; it must be greater than 0"
            raise ConfigError("config.range", text)
        most = sys.float_info.max if field.name in _AGES else TIMEOUT_MAX
        if isinstance(value, float) and value > most:
            text = f"{key}.{field.encode_name} is {value}; it must be at most {most:.10g}"
            raise ConfigError("config.range", text)


def brokers_of(url: str) -> list[str]:
    """The addresses in `kafka://host:port,…`. Raises ConfigError `config.log`."""
    addresses = url.removeprefix(KAFKA).split(",")
    if not url.startswith(KAFKA) or not all(BROKER.fullmatch(one) for one in addresses):
        text = f"log is {url!r}; it must be `files` or `kafka://host:port,host:port,…`"
        raise ConfigError("config.log", text)
    return addresses


def _check_log(config: Config) -> None:
    if not config.is_cluster:
        return
    brokers_of(config.log)
    if config.durability == "memory":
        text = "durability is memory, but log names a Kafka cluster, which always stores"
        raise ConfigError("config.log", f"{text}; use fsync or interval")
    if not KAFKA_PREFIX.fullmatch(config.cluster.prefix):
        text = f"cluster.prefix is {config.cluster.prefix!r}; use up to 60 of A-Z a-z 0-9 . _ -"
        raise ConfigError("config.invalid", text)
    if config.cluster.insync_min > config.cluster.replicas:
        cluster = config.cluster
        text = f"cluster.insync-min is {cluster.insync_min}; it must be at most cluster.replicas"
        text += f", which is {cluster.replicas}"
        raise ConfigError("config.range", text)


def _check_hosts(hosts: list[str]) -> None:
    for host in hosts:
        if not HOST_NAME.fullmatch(host):
            text = f"http.hosts: {host!r} must be a name or address alone, like bus.example"
            raise ConfigError("config.invalid", text)


def _check_paths(topic: DeclaredTopic) -> None:
    for field, path in (("message-id", topic.message_id), ("event-time", topic.event_time)):
        if path is not None and not JSON_PATH.fullmatch(path):
            text = f"topics: {topic.name}: {field} is {path!r}; write a path like $.order.id"
            raise ConfigError("config.invalid", text)


def check_schema(topic: DeclaredTopic, key: str) -> None:
    """Raises ConfigError `config.schema`, which names the column."""
    if topic.schema is not None:
        try:
            columns_of(topic.schema)
        except ValueError as error:
            raise ConfigError("config.schema", f"{key}: schema: {error}") from error


def _check_tables(config: Config) -> None:
    for table in config.tables:
        if "." not in table.name:
            text = f"tables: {table.name!r} needs the name of its pipeline, as in shop.orders"
            advice = "declare expectations of messages in topics"
            raise ConfigError("config.invalid", f"{text}; {advice}")
        _check_expectations("tables", table)


def _check_expectations(key: str, topic: DeclaredTopic | DeclaredTable) -> None:
    found = [*topic.expect, *topic.expect_or_drop, *topic.expect_or_fail]
    if len(found) > EXPECTATIONS_MAX or len(set(found)) < len(found):
        text = f"has more than {EXPECTATIONS_MAX} expectations, or two of one name"
        raise ConfigError("config.invalid", f"{key}: {topic.name}: {text}")
    for name in found:
        if not name.isprintable() or not 0 < len(name) <= EXPECTATION_NAME_MAX:
            text = f"{name[:40]!r}: use 1 to {EXPECTATION_NAME_MAX} printable characters"
            raise ConfigError("config.invalid", f"{key}: {topic.name}: {text}")


def _check_not_queue(connector: Connector, key: str) -> None:
    defaults = Connector()
    for field in ("topic", "account", "token_required"):
        if getattr(connector, field) != getattr(defaults, field):
            shown = f"{key}.{field.replace('_', '-')}"
            raise ConfigError("config.invalid", f"{shown} is only for queue connectors")


def _check_queue(connector: Connector, key: str) -> None:
    if connector.account != names.ACCOUNT and not names.is_account(connector.account):
        text = f"{key}.account: {connector.account!r} cannot be the name of an account"
        raise ConfigError("config.invalid", text)
    if connector.topic is None:
        raise ConfigError("config.invalid", f"{key}.topic is missing: a queue connector needs one")
    if len(connector.protocols) > 1:
        text = f"{key}.speaks: queue must be the only protocol of its connector"
        raise ConfigError("config.invalid", text)
    if connector.protocol != "tcp":
        raise ConfigError("config.invalid", f"{key}.protocol: must be tcp for a queue connector")


def read_file(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML or JSON file. Raises ConfigError, which begins with `what`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("config.file", f"{what}: cannot read {path}: {error.strerror}") from error
    try:
        if path.suffix == ".toml":
            return tomllib.loads(content.decode())
        loaded = msgspec.json.decode(content)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config.syntax", f"{what}: {path}: {error}") from error
    except RecursionError as error:
        raise ConfigError("config.syntax", f"{what}: {path}: it is nested too deeply") from error
    if not isinstance(loaded, dict):
        raise ConfigError("config.syntax", f"{what}: {path}: must be a JSON object")
    return cast(dict[str, Any], loaded)


def _read_topics(topic_file: str, base: Path) -> list[Any]:
    path = base / topic_file
    # goMS resolves the path against the working directory; users expect the config file's folder.
    if not path.exists() and Path(topic_file).exists():
        path = Path(topic_file)
    loaded = read_file(path, "topic-config")
    unknown = set(loaded) - {"topics"}
    if unknown or not isinstance(loaded.get("topics"), list):
        text = f'topic-config: {path} must be {{"topics": [...]}} and nothing else'
        raise ConfigError("config.invalid", text)
    return cast(list[Any], loaded["topics"])


def _read_schemas(topics: Any, base: Path) -> None:
    """Replace `schema-file` of topics by the columns in these files."""
    for topic in topics if isinstance(topics, list) else []:
        file = topic.get("schema-file") if isinstance(topic, dict) else None
        if not isinstance(file, str):
            continue
        where = f"topics: {topic.get('name')}: schema-file"
        if "schema" in topic:
            raise ConfigError("config.schema", f"{where}: set schema or schema-file, not both")
        try:
            content = (base / file).read_bytes()
        except OSError as error:
            text = f"{where}: cannot read {base / file}: {error.strerror}"
            raise ConfigError("config.file", text) from error
        topic["schema"] = columns_in(content, f"{where}: {file}")


def _accept_old_spellings(raw: dict[str, Any]) -> None:
    connectors = raw.get("connectors")
    for number, connector in enumerate(connectors if isinstance(connectors, list) else []):
        if isinstance(connector, dict) and "protocoll" in connector:
            if "protocol" in connector:
                text = f"connectors[{number}]: set protocol or protocoll, not both"
                raise ConfigError("config.invalid", text)
            connector["protocol"] = connector.pop("protocoll")


def _apply_environment(raw: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Apply environment variables; return their names by the keys that they set."""
    variables = {}
    for name, text in sorted(environ.items()):
        if not name.startswith("POLYBUS_") or name in NOT_SETTINGS:
            continue
        path = [part.lower().replace("_", "-") for part in name[len("POLYBUS_") :].split("__")]
        target = raw
        variables[".".join(path)] = name
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError("config.environment", f"{name}: {part} is not a group")
        try:
            target[path[-1]] = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            target[path[-1]] = text

    return variables


def _say(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key in front: `limits.x: expected int, got str`."""
    text, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    unknown = _UNKNOWN.fullmatch(text)
    if unknown:
        key = f"{where}.{unknown[1]}" if where else unknown[1]
        return f"{key}: there is no such setting{names.meant(unknown[1], _known_keys())}"
    return f"{where}: {text}" if where else text


def _known_keys() -> set[str]:
    groups = {Settings}
    while further := {one for group in groups for one in group.__subclasses__()} - groups:
        groups |= further
    return {field.encode_name for group in groups for field in msgspec.structs.fields(group)}


# Where a key was set.


def _place_of(text: str, path: str | os.PathLike[str] | None, variables: Mapping[str, str]) -> str:
    """The variable, or the file and line, of the key that an error's text begins with."""
    found = _KEY.match(text)
    if found is None:
        return ""
    key = found[0]
    for known, variable in variables.items():
        if key == known or key.startswith((f"{known}.", f"{known}[")):
            return variable
    content = "" if path is None else Path(path).read_text(errors="replace")
    at = _find(content, _PARTS.findall(key))
    if at is not None:
        return f"{path}:{content.count(chr(10), 0, at) + 1}"
    # A variable may have made the whole group.
    below = [name for known, name in variables.items() if known.startswith(f"{key}.")]
    return below[0] if below else str(path or "")


def _find(content: str, parts: list[str]) -> int | None:
    """The position of the last part of a key in a TOML or JSON file."""
    at, found, last = 0, None, ""
    for part in parts:
        if part.startswith("["):
            start = _entry(content, at, last, int(part[1:-1]))
        else:
            name = re.escape(part)
            pattern = rf'^\s*\[+\s*(?:[\w-]+\.)*{name}\s*\]+|(?<![\w"-])"?{name}"?\s*[=:]'
            match = re.compile(pattern, re.MULTILINE).search(content, at)
            start = (
                None if match is None else match.start() + len(match[0]) - len(match[0].lstrip())
            )
            last = part
        if start is None:
            break
        at = found = start
    return found


def _entry(content: str, at: int, name: str, number: int) -> int | None:
    """The position where an entry of a list begins: a table `[[name]]`, or a brace."""
    tables = list(re.finditer(rf"^\s*\[\[\s*{re.escape(name)}\s*\]\]", content, re.MULTILINE))
    if tables:
        return tables[number].end() if number < len(tables) else None
    depth = 0
    for index in range(at, len(content)):
        if content[index] == "{":
            if depth == 0 and number == 0:
                return index
            number -= depth == 0
            depth += 1
        elif content[index] == "}":
            depth -= 1
    return None
