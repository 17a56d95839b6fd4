"""Settings: one frozen model, read from TOML or JSON, checked once.

The goMS files of old load unchanged (`topic-config`, `connectors` with `protocoll`). An unknown
key is an error that names it. `POLYBUS_…` in the environment overrides (two underscores go one
level down: `POLYBUS_LIMITS__OUTBOX_BYTES_MAX=1048576`).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from polybus import names
from polybus.errors import ConfigError, UsageError

PORT = 55545
Speaks = Literal["goms", "boson-frames", "boson-properties", "http", "queue"]
DETECTED: tuple[Speaks, ...] = ("goms", "boson-frames", "boson-properties", "http")
DETECTABLE_MESSAGE_BYTES_MAX = 256 << 20
JSON_PATH = re.compile(r"\$(\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]{1,6}\])+")
SPARK_VARIABLES = ("POLYBUS_SPARK_ARCHIVE", "POLYBUS_SPARK_DRIVER", "POLYBUS_SPARK_RECORD")
# In the environment too, but for the scanner, for clients and for Spark's start.
NOT_SETTINGS = (
    *("POLYBUS_PURE", "POLYBUS_URL", "POLYBUS_TOKEN", "POLYBUS_JAVA", *SPARK_VARIABLES),
)


class Settings(
    msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True
):
    """The base of every settings group: kebab-case keys, nothing unknown."""


class Tls(Settings, frozen=True):
    """A certificate chain and its key, in PEM files."""

    cert: str
    key: str


class Connector(Settings, frozen=True):
    """A listener: an address, a transport, and the protocols spoken there."""

    protocol: Literal["tcp", "udp"] = "tcp"
    ip: str = "127.0.0.1"
    port: int = PORT
    speaks: list[Speaks] | Speaks = msgspec.field(default_factory=lambda: list(DETECTED))
    topic: str | None = None
    """The topic a queue connector bridges to; it is created if it is not there."""
    default_topic: str | None = None
    """Where Boson messages with an empty topic go; without it they are an error."""
    reg_ack: bool = False
    """Answer every goMS register with a reg-ack, asked for or not."""
    tls: Tls | None = None

    @property
    def protocols(self) -> tuple[Speaks, ...]:
        return (self.speaks,) if isinstance(self.speaks, str) else tuple(self.speaks)


class Limits(Settings, frozen=True):
    """Every bound, with its default. docs/architecture.md says what happens at each."""

    message_bytes_max: int = 64 << 20
    topic_bytes_max: int = names.TOPIC_BYTES_MAX
    topics_per_request_max: int = 1024
    topics_max: int = 100_000
    parts_max: int = 100_000
    parts_bytes_max: int = 64 << 20
    properties_max: int = 1024
    json_depth_max: int = 64
    outbox_bytes_max: int = 16 << 20
    connections_max: int = 50_000
    subscriptions_per_connection_max: int = 100_000
    assembly_bytes_max: int = 32 << 20
    """Unfinished messages of all connections together, beyond 64 KiB each."""
    memory_bytes_max: int = 48 << 20
    """Outboxes and uncommitted messages together; over it nobody is read from."""
    consumers_max: int = 1000
    udp_peers_max: int = 10_000
    udp_idle_s: float = 300.0
    detect_timeout_s: float = 10.0
    message_timeout_s: float = 30.0
    """How long an unfinished message may stand still before its connection is closed."""
    shutdown_timeout_s: float = 10.0
    error_lines_per_s: int = 10
    staging_bytes_max: int = 4 << 30
    """What writers have uploaded and not committed yet, all together."""
    transaction_bytes_max: int = 1 << 30
    transaction_part_bytes: int = 4 << 20
    """A transaction of more goes to the log in several commits."""
    producers_max: int = 10_000
    """Writers of transactions that are remembered, so that none is done twice."""


class Retention(Settings, frozen=True):
    """When history is removed; None keeps it for ever. A topic may set its own."""

    age_s: float | None = None
    bytes: int | None = None


class BusRetention(Retention, frozen=True):
    """The bus's own limits, and whether consumers that are behind hold history back."""

    hold_for_consumers: bool = True
    """Keep what a consumer has not read yet, even over the limits."""
    hold_age_s: float = 7 * 86_400.0
    """A consumer that was not heard of for so long holds nothing back any more."""


class System(Settings, frozen=True):
    """The system topics `$events`, `$stats` and `$alerts`, which the bus makes and writes."""

    events: bool = True
    """Whether deliveries, confirmations and other happenings are written to `$events`."""
    retention_age_s: float = 7 * 86_400.0
    """How long messages of a system topic are kept; for topics that are made from now on."""
    retention_bytes: int = 1 << 30


class Journal(Settings, frozen=True):
    """How the log commits and rolls."""

    segment_bytes_max: int = 256 << 20
    segment_age_s: float = 600.0
    commit_bytes: int = 1 << 20
    commit_delay_ms: float = 5.0
    fsync_interval_ms: float = 50.0
    handover_interval_s: float = 30.0
    memory_log_bytes_max: int = 256 << 20
    """What `durability = "memory"` keeps over all topics; the oldest messages go first."""


class Msgstream(Settings, frozen=True):
    heartbeat_s: float = 60.0
    session_ttl_s: float = 660.0
    session_packs_max: int = 10_000
    session_bytes_max: int = 64 << 20
    sessions_max: int = 100_000
    ping_interval_s: float = 20.0
    """How often a WebSocket is pinged; one that does not answer until the next ping is closed."""
    websocket_message_bytes_max: int = 64 << 10


class Http(Settings, frozen=True):
    cors_origins: list[str] = []
    """Origins whose pages may use the API; `*` means all."""
    head_bytes_max: int = 64 << 10
    """A request's URL and headers together."""
    json_bytes_max: int = 8 << 20
    """The body of a request that is not messages."""
    keep_alive_s: float = 75.0


class Pipeline(Settings, frozen=True):
    """What the standard pipeline makes of the topics, and how."""

    gold: bool = True
    """Traffic per minute and top senders: the tables `traffic` and `top_senders`."""
    deliveries: bool = True
    """The delivery report of sessions: the table `deliveries`."""
    stats: bool = True
    """Traffic back to the topic `$stats`."""
    alerts: bool = True
    """Rates that are out of the ordinary: the table `alerts` and the topic `$alerts`."""
    watermark_s: float = 600.0
    """How long a message id is remembered, and how old an event may be when it arrives."""
    ids_max: int = 1_000_000
    """Message ids remembered at most, whatever their age."""
    value_bytes_max: int = 16 << 20
    """Larger values are not decoded but quarantined."""
    batch_rows_max: int = 100_000
    """Messages of one micro-batch."""
    alert_factor: float = 4.0
    """How many times its own usual rate a topic's rate must be to be worth an alert."""
    alert_messages_min: int = 100
    """Messages of a minute below which no rate is worth an alert."""
    alert_history_s: float = 300.0
    """How long a topic must be known before its rate is judged."""
    alert_silence_s: float = 180.0
    """How long a busy topic must be silent to be worth an alert."""
    alert_pause_s: float = 600.0
    """How long the same alert of the same topic is not repeated."""


class Topic(Settings, frozen=True):
    """A topic declared in the config, with its own retention and how its values are decoded."""

    name: str
    retention: Retention = Retention()
    format: Literal["any", "json"] = "any"
    """`json`: what is not JSON is quarantined."""
    schema: str | None = None
    """Columns of the JSON objects, as Spark writes them: `id BIGINT NOT NULL, name STRING`."""
    message_id: str | None = None
    """Where a JSON value has its id, by which duplicates are known: `$.id`."""
    event_time: str | None = None
    """Where a JSON value has its time: `$.sent.at`."""


class Config(Settings, frozen=True):
    """All settings of a bus."""

    data: str = "./polybus-data"
    topic_config: str | None = None
    topics: list[str | Topic] = []
    connectors: list[Connector] = msgspec.field(
        default_factory=lambda: [Connector(), Connector(protocol="udp", speaks="goms")]
    )
    durability: Literal["fsync", "interval", "memory"] = "fsync"
    slow_subscriber: Literal["disconnect", "drop-oldest", "wait"] = "disconnect"
    """What happens to a subscriber whose outbox is full (`wait`: its publishers wait instead)."""
    limits: Limits = Limits()
    retention: BusRetention = BusRetention()
    system: System = System()
    journal: Journal = Journal()
    msgstream: Msgstream = Msgstream()
    http: Http = Http()
    pipeline: Pipeline = Pipeline()

    def topic_list(self) -> list[Topic]:
        """The declared topics, names in their canonical spelling, each once.

        A queue connector declares the topic it names.
        """
        declared = [("topics", entry) for entry in self.topics]
        for number, connector in enumerate(self.connectors):
            if "queue" in connector.protocols and connector.topic is not None:
                declared.append((f"connectors[{number}].topic", connector.topic))
        topics: dict[str, Topic] = {}
        for key, entry in declared:
            topic = Topic(name=entry) if isinstance(entry, str) else entry
            try:
                name = names.canonical(topic.name, topic_bytes_max=self.limits.topic_bytes_max)
                names.check_creatable(name)
            except UsageError as error:
                raise ConfigError("config.topic", f"{key}: {topic.name!r}: {error.text}") from error
            if names.is_reserved(name):
                raise ConfigError("config.topic", f"{key}: {name!r}: `$` names are the system's")
            topics.setdefault(name, msgspec.structs.replace(topic, name=name))
        return list(topics.values())


def load(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file (none: the defaults), apply the environment, check everything.

    Raises:
        ConfigError: with a sentence that names the key.
    """
    raw: dict[str, Any] = {}
    base = Path()
    if path is not None:
        raw = _read_file(Path(path), "config")
        base = Path(path).resolve().parent
    _apply_environment(raw, os.environ if environ is None else environ)
    _accept_old_spellings(raw)
    topic_file = raw.get("topic-config")
    if isinstance(topic_file, str):
        if not isinstance(raw.get("topics", []), list):
            raise ConfigError("config.invalid", "topics: must be a list of names or tables")
        raw["topics"] = [*raw.get("topics", []), *_read_topics(topic_file, base)]
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError("config.invalid", _say(error)) from error
    check(config)
    return config


def check(config: Config) -> None:
    """Check what types cannot say. Raises ConfigError."""
    if not config.connectors:
        raise ConfigError("config.invalid", "connectors is empty: nobody could reach the bus")
    for number, connector in enumerate(config.connectors):
        key = f"connectors[{number}]"
        if not 0 <= connector.port <= 65535:
            text = f"{key}.port is {connector.port}; it must be 0 (any free port) to 65535"
            raise ConfigError("config.range", text)
        if not connector.protocols:
            raise ConfigError("config.invalid", f"{key}.speaks is empty")
        if "queue" in connector.protocols:
            _check_queue(connector, key)
        elif connector.topic is not None:
            raise ConfigError("config.invalid", f"{key}.topic is for queue connectors only")
        _check_default_topic(connector, key)
        big = config.limits.message_bytes_max > DETECTABLE_MESSAGE_BYTES_MAX
        if big and len(connector.protocols) > 1:
            text = (
                f"{key}.speaks must name one protocol while limits.message-bytes-max is over "
                "256 MiB: protocols can then no longer be told apart by their first bytes"
            )
            raise ConfigError("config.invalid", text)
    for name in ("limits", "journal", "msgstream", "http", "retention", "system", "pipeline"):
        _check_positive(getattr(config, name), name)
    for topic in config.topic_list():
        _check_positive(topic.retention, f"topics: {topic.name}: retention")
        _check_paths(topic)


def _check_positive(group: Settings, key: str) -> None:
    for field in msgspec.structs.fields(group):
        value = getattr(group, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        # Not `<= 0`: TOML has a number that is neither more nor less.
        if not value > 0:
            text = f"{key}.{field.encode_name} is {value}; it must be more than 0"
            raise ConfigError("config.range", text)


def _check_paths(topic: Topic) -> None:
    for field, path in (("message-id", topic.message_id), ("event-time", topic.event_time)):
        if path is not None and not JSON_PATH.fullmatch(path):
            text = f"topics: {topic.name}: {field} is {path!r}; a path is like $.order.id"
            raise ConfigError("config.invalid", text)


def _check_default_topic(connector: Connector, key: str) -> None:
    if connector.default_topic is None:
        return
    try:
        name = names.canonical(connector.default_topic)
    except UsageError as error:
        raise ConfigError("config.topic", f"{key}.default-topic: {error.text}") from error
    if names.is_reserved(name):
        raise ConfigError("config.topic", f"{key}.default-topic: `$` names are the system's")


def _check_queue(connector: Connector, key: str) -> None:
    if connector.topic is None:
        raise ConfigError("config.invalid", f"{key}.topic is missing: a queue connector names it")
    if len(connector.protocols) > 1:
        raise ConfigError("config.invalid", f"{key}.speaks: queues cannot be detected among others")
    if connector.protocol != "tcp":
        raise ConfigError("config.invalid", f"{key}.protocol: a queue connector is over tcp")
    if connector.tls is not None:
        raise ConfigError("config.invalid", f"{key}.tls: queues are not encrypted")


def _read_file(path: Path, what: str) -> dict[str, Any]:
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
    if not isinstance(loaded, dict):
        raise ConfigError("config.syntax", f"{what}: {path}: not an object")
    return cast(dict[str, Any], loaded)


def _read_topics(topic_file: str, base: Path) -> list[Any]:
    path = base / topic_file
    # goMS took the path from the working directory; beside the config file is what people expect.
    if not path.exists() and Path(topic_file).exists():
        path = Path(topic_file)
    loaded = _read_file(path, "topic-config")
    unknown = set(loaded) - {"topics"}
    if unknown or not isinstance(loaded.get("topics"), list):
        text = f'topic-config: {path} must be {{"topics": [...]}} and nothing else'
        raise ConfigError("config.invalid", text)
    return cast(list[Any], loaded["topics"])


def _accept_old_spellings(raw: dict[str, Any]) -> None:
    connectors = raw.get("connectors")
    for number, connector in enumerate(connectors if isinstance(connectors, list) else []):
        if isinstance(connector, dict) and "protocoll" in connector:
            if "protocol" in connector:
                text = f"connectors[{number}]: protocoll and protocol are the same setting"
                raise ConfigError("config.invalid", text)
            connector["protocol"] = connector.pop("protocoll")


def _apply_environment(raw: dict[str, Any], environ: Mapping[str, str]) -> None:
    for name, text in sorted(environ.items()):
        if not name.startswith("POLYBUS_") or name in NOT_SETTINGS:
            continue
        path = [part.lower().replace("_", "-") for part in name[len("POLYBUS_") :].split("__")]
        target = raw
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError("config.environment", f"{name}: {part} is not a group")
        try:
            target[path[-1]] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            target[path[-1]] = text


def _say(error: msgspec.ValidationError) -> str:
    """msgspec's sentence with the key in front: `limits.x: expected int, got str`."""
    text, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    return f"{where}: {text}" if where else text
