"""Settings: one frozen model, read from a TOML or JSON file and checked once.

goMS config files load unchanged (`topic-config`, `connectors` with `protocoll`). An unknown key is
an error that names the key. Environment variables `POLYBUS_…` override the file; two underscores
separate a group from its key: `POLYBUS_LIMITS__OUTBOX_BYTES_MAX=1048576`.

SIGHUP makes `polybus serve` read its settings again. `topics` (new ones are created),
`topic-config`, `retention`, `pipeline` and the files of certificates take effect; the latter also
without it. The bus names other keys that have changed in its log, and they keep their values until
a restart. An invalid file changes nothing.
"""

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
RESERVED = "names that begin with `$` are reserved for system topics"
Speaks = Literal["goms", "boson-frames", "boson-properties", "http", "queue"]
DETECTED: tuple[Speaks, ...] = ("goms", "boson-frames", "boson-properties", "http")
DETECTABLE_MESSAGE_BYTES_MAX = 256 << 20
HOST_NAME = re.compile(r"[^:/\[\]*\s]+|\[?[0-9A-Fa-f:.]+\]?")
JSON_PATH = re.compile(r"\$(\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]{1,6}\])+")
SPARK_VARIABLES = ("POLYBUS_SPARK_ARCHIVE", "POLYBUS_SPARK_DRIVER", "POLYBUS_SPARK_RECORD")
# Environment variables of the scanner, of clients and of Spark's start: not settings of the bus.
NOT_SETTINGS = (
    *("POLYBUS_PURE", "POLYBUS_URL", "POLYBUS_TOKEN", "POLYBUS_JAVA", *SPARK_VARIABLES),
)


class Settings(
    msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True
):
    """The base of every settings group: kebab-case keys; unknown keys are refused.

    The string below each field is its meaning in docs/reference/config.md.
    """


class Tls(Settings, frozen=True):
    """TLS of a connector, from PEM files. The bus loads them again when they change."""

    cert: str
    """Path of the certificate chain, leaf certificate first."""
    key: str
    """Path of the private key, not encrypted."""
    required: bool = False
    """Refuse connections without TLS. By default the connector accepts both; a queue connector
    with `tls` always requires it."""
    client_ca: str | None = None
    """Path of the authorities that sign the certificates of clients, in PEM. Clients may then
    present a certificate; one that these authorities did not sign is refused."""


class Connector(Settings, frozen=True):
    """A listener: an address, a transport, and the protocols spoken there."""

    protocol: Literal["tcp", "udp"] = "tcp"
    """The transport; goMS files spell the key `protocoll`. UDP speaks goMS only."""
    ip: str = "127.0.0.1"
    """The address to listen on."""
    port: int = PORT
    """The port to listen on; 0 takes any free port."""
    speaks: list[Speaks] | Speaks = msgspec.field(default_factory=lambda: list(DETECTED))
    """The protocols accepted here. The bus detects which one a connection speaks from its first
    bytes; `queue` cannot be detected and must stand alone."""
    topic: str | None = None
    """The topic of a queue connector, which requires one. The bus creates it if it is missing."""
    account: str = names.ACCOUNT
    """The account whose topic a queue connector has."""
    token_required: bool = False
    """The first message on each connection of a queue connector must be a token of its account."""
    default_topic: str | None = None
    """The topic of Boson messages whose topic is empty; without it they are refused."""
    reg_ack: bool = False
    """Answer every goMS register with a reg-ack, even if the client did not ask for one."""
    tls: Tls | None = None
    """Encrypts the connections of this connector."""

    @property
    def protocols(self) -> tuple[Speaks, ...]:
        return (self.speaks,) if isinstance(self.speaks, str) else tuple(self.speaks)


class Limits(Settings, frozen=True):
    """Every limit and its default. docs/architecture.md says what happens when one is reached."""

    message_bytes_max: int = 64 << 20
    """Size of one message."""
    topic_bytes_max: int = names.TOPIC_BYTES_MAX
    """Length of a topic name in UTF-8."""
    topics_per_request_max: int = 1024
    """Topics in one request to subscribe, register or publish."""
    topics_max: int = 100_000
    """Topics of the bus. Topics in the config are created even beyond it."""
    parts_max: int = 100_000
    """Parts of one multi-part Boson message."""
    parts_bytes_max: int = 64 << 20
    """Size of all parts of one multi-part Boson message."""
    properties_max: int = 1024
    """Properties of one Boson message, or headers of one goMS send."""
    json_depth_max: int = 64
    """Nesting depth of a JSON object from a client."""
    outbox_bytes_max: int = 16 << 20
    """Bytes queued for one subscriber. Beyond it `slow-subscriber` decides."""
    connections_max: int = 50_000
    """Open connections."""
    subscriptions_per_connection_max: int = 100_000
    """Subscriptions of one connection."""
    assembly_bytes_max: int = 32 << 20
    """Memory for incomplete messages of all connections together, beyond 64 KiB each."""
    memory_bytes_max: int = 48 << 20
    """Memory for outboxes and uncommitted messages together. Above it the bus stops reading from
    publishers."""
    consumers_max: int = 1000
    """Consumer groups."""
    udp_peers_max: int = 10_000
    """UDP addresses that the bus remembers."""
    udp_idle_s: float = 300.0
    """After this time without a datagram a UDP address and its registrations are forgotten."""
    detect_timeout_s: float = 10.0
    """How long after its first byte a connection may take to show its protocol."""
    message_timeout_s: float = 30.0
    """How long an incomplete message may make no progress before its connection is closed."""
    shutdown_timeout_s: float = 10.0
    """How long a stop waits for receipts and for the last bytes to subscribers."""
    error_lines_per_s: int = 10
    """Log lines about misbehaving peers per second; further ones are only counted."""
    staging_bytes_max: int = 4 << 30
    """Uploaded and uncommitted bytes of all transaction producers together."""
    transaction_bytes_max: int = 1 << 30
    """Size of one transaction."""
    transaction_part_bytes: int = 4 << 20
    """A larger transaction is written to the log in several commits of this size."""
    producers_max: int = 10_000
    """Transaction producers whose last batch is remembered, so that a repeated batch is ignored."""
    account_connections_max: int = 10_000
    """Connections that are logged in to one account. Each `account-…` limit is for every account
    but the default one, and the account's own config may set another."""
    account_sessions_max: int = 10_000
    """Open sessions of one account."""
    account_topics_max: int = 10_000
    """Topics of one account."""
    account_bytes_max: int = 1 << 40
    """Size of the history of one account's topics; beyond it nothing more is published."""
    account_messages_per_s_max: int = 100_000_000
    """Messages that one account publishes per second."""
    account_bytes_per_s_max: int = 100 << 30
    """Bytes that one account publishes per second."""
    signups_per_address_hour_max: int = 10
    """Sign-ups from one address in an hour, if `accounts.signup` allows them at all."""
    signups_per_hour_max: int = 1000
    """Sign-ups from all addresses in an hour."""


class Retention(Settings, frozen=True):
    """When the history of a topic is removed. If unset, history is kept forever."""

    age_s: float | None = None
    """History files whose newest message is older than this are removed."""
    bytes: int | None = None
    """The oldest history files are removed while the topic's history is larger than this."""


class BusRetention(Retention, frozen=True):
    """Retention of topics that set none themselves, and what consumers hold back."""

    hold_for_consumers: bool = True
    """Keep messages that a consumer group has not read yet, even beyond the limits."""
    hold_age_s: float = 7 * 86_400.0
    """A consumer group that has not reported for this long holds nothing back."""


class System(Settings, frozen=True):
    """The system topics `$events`, `$stats`, `$alerts` and `$commits`, read-only for clients."""

    events: bool = True
    """Record deliveries, confirmations and other events in the topic `$events`."""
    retention_age_s: float = 7 * 86_400.0
    """Maximum age of messages in a system topic. Applies to topics created from now on."""
    retention_bytes: int = 1 << 30
    """Maximum size of a system topic's history. Applies to topics created from now on."""


class Journal(Settings, frozen=True):
    """How the log commits messages and rolls its segments."""

    segment_bytes_max: int = 256 << 20
    """A segment of this size is sealed and the next one begins."""
    segment_age_s: float = 600.0
    """A segment of this age is sealed, if it has any messages."""
    commit_bytes: int = 1 << 20
    """A commit is written as soon as this much is queued."""
    commit_delay_ms: float = 5.0
    """How long queued messages wait for more if nobody waits for a receipt."""
    fsync_interval_ms: float = 50.0
    """Time between fsyncs with `durability = "interval"`."""
    handover_interval_s: float = 30.0
    """Time between runs of maintenance: the hand-over of sealed segments to history, and
    retention."""
    memory_log_bytes_max: int = 256 << 20
    """Memory for messages of all topics with `durability = "memory"`; the oldest are dropped."""


class Msgstream(Settings, frozen=True):
    """HTTP sessions and their streams."""

    heartbeat_s: float = 60.0
    """How long a poll without messages waits before it gets an empty answer."""
    session_ttl_s: float = 660.0
    """A session expires after this time without a request, unless it sets its own."""
    session_packs_max: int = 10_000
    """Unconfirmed packs that a session keeps; the oldest are dropped."""
    session_bytes_max: int = 64 << 20
    """Size of the unconfirmed packs that a session keeps; the oldest are dropped."""
    sessions_max: int = 100_000
    """Open sessions."""
    ping_interval_s: float = 20.0
    """Time between WebSocket pings. A WebSocket that has not answered by the next is closed."""
    websocket_message_bytes_max: int = 64 << 10
    """Size of one message from a WebSocket client."""


class Http(Settings, frozen=True):
    """The HTTP API."""

    cors_origins: list[str] = []
    """Origins whose pages may call the API; `*` allows all."""
    hosts: list[str] = []
    """Further names of the bus in the URLs of its clients, without ports. The addresses that it
    listens on and `localhost` need not be listed; requests to other names are refused."""
    head_bytes_max: int = 64 << 10
    """Size of a request's URL and headers together."""
    json_bytes_max: int = 8 << 20
    """Size of a request body that does not carry messages."""
    keep_alive_s: float = 75.0
    """An idle connection is closed after this time."""


class AccountSettings(Settings, frozen=True):
    """Who may use the bus without an account, and who may create one."""

    default: Literal["loopback", "off", "open"] = "loopback"
    """Who is the default account without a login: clients on this machine, nobody, or everybody.
    A bus with `open` that listens beyond loopback needs `--insecure`."""
    signup: bool = False
    """Whether anybody may create an account over HTTP."""


class Pipeline(Settings, frozen=True):
    """What the standard pipeline computes from the topics, and how."""

    gold: bool = True
    """Write traffic per minute and top senders to the tables `traffic` and `top_senders`."""
    deliveries: bool = True
    """Write the delivery report of sessions to the table `deliveries`."""
    stats: bool = True
    """Publish traffic to the topic `$stats`."""
    alerts: bool = True
    """Write unusual message rates to the table `alerts` and the topic `$alerts`."""
    watermark_s: float = 600.0
    """How long a message id is remembered, and how late an event may arrive."""
    ids_max: int = 1_000_000
    """Remembered message ids, whatever their age."""
    value_bytes_max: int = 16 << 20
    """Larger values are quarantined, as their first 1,024 bytes, instead of decoded."""
    batch_rows_max: int = 100_000
    """Messages in one micro-batch."""
    alert_factor: float = 4.0
    """A topic's rate raises an alert at this multiple of its usual rate."""
    alert_messages_min: int = 100
    """Messages per minute below which no rate raises an alert."""
    alert_history_s: float = 300.0
    """How long a topic must be known before its rate can raise an alert."""
    alert_silence_s: float = 180.0
    """How long a busy topic must be silent to raise an alert."""
    alert_pause_s: float = 600.0
    """The same alert of a topic is not repeated within this time."""


class DeclaredTopic(Settings, frozen=True):
    """A topic declared in the config: its retention, and how the pipeline decodes its values."""

    name: str
    """The topic's name; upper case is folded to lower case."""
    retention: Retention = Retention()
    """Limits of this topic's history, in place of the bus's."""
    format: Literal["any", "json"] = "any"
    """With `json`, values that are not JSON are quarantined."""
    schema: str | None = None
    """Columns of the JSON objects in Spark's notation: `id BIGINT NOT NULL, name STRING`."""
    message_id: str | None = None
    """Path of the id inside a JSON value, used to drop duplicates: `$.id`."""
    event_time: str | None = None
    """Path of the event time inside a JSON value: `$.sent.at`."""


class Config(Settings, frozen=True):
    """All settings of a bus."""

    data: str = "./polybus-data"
    """The data directory. The bus creates it."""
    group_access: bool = False
    """Files and folders in `data` are for the bus's user alone (0600 and 0700). With `true` the
    user's group may use them too, as far as the umask allows."""
    topic_config: str | None = None
    """Path of a file `{"topics": [...]}` with further topics, relative to the config file."""
    topics: list[str | DeclaredTopic] = []
    """Topics to create at the start: names, or tables with settings."""
    connectors: list[Connector] = msgspec.field(
        default_factory=lambda: [Connector(), Connector(protocol="udp", speaks="goms")]
    )
    """Where the bus listens."""
    durability: Literal["fsync", "interval", "memory"] = "fsync"
    """When a message counts as stored: after its own fsync, after an fsync every
    `journal.fsync-interval-ms`, or in memory only (lost at a restart)."""
    slow_subscriber: Literal["disconnect", "drop-oldest", "wait"] = "disconnect"
    """What happens when a subscriber's outbox is full; with `wait` its publishers wait."""
    limits: Limits = Limits()
    """Limits on sizes, counts and times."""
    retention: BusRetention = BusRetention()
    """When history is removed."""
    system: System = System()
    """The system topics."""
    journal: Journal = Journal()
    """Commits and segments of the log."""
    msgstream: Msgstream = Msgstream()
    """HTTP sessions."""
    http: Http = Http()
    """The HTTP API."""
    accounts: AccountSettings = AccountSettings()
    """Accounts and logins."""
    pipeline: Pipeline = Pipeline()
    """The standard pipeline."""

    def topic_list(self) -> list[DeclaredTopic]:
        """The declared topics with canonical names, without duplicates.

        A queue connector declares its topic too. Raises ConfigError `config.topic`.
        """
        declared = [("topics", entry) for entry in self.topics]
        for number, connector in enumerate(self.connectors):
            is_own = connector.account == names.ACCOUNT
            if "queue" in connector.protocols and connector.topic is not None and is_own:
                declared.append((f"connectors[{number}].topic", connector.topic))
        topics: dict[str, DeclaredTopic] = {}
        for key, entry in declared:
            topic = DeclaredTopic(name=entry) if isinstance(entry, str) else entry
            name = _topic_name(key, topic.name, self.limits.topic_bytes_max)
            topics.setdefault(name, msgspec.structs.replace(topic, name=name))
        return list(topics.values())


def load(path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file, apply the environment, and check the result; no file means defaults.

    Raises ConfigError, whose text names the key.
    """
    raw: dict[str, Any] = {}
    base = Path()
    if path is not None:
        raw = read_file(Path(path), "config")
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
            raise ConfigError("config.invalid", f"{key}.speaks is empty")
        if connector.tls is not None and connector.protocol == "udp":
            raise ConfigError("config.invalid", f"{key}.tls: UDP has no TLS")
        if "queue" in connector.protocols:
            _check_queue(connector, key)
        else:
            _check_not_queue(connector, key)
        if connector.default_topic is not None:
            limit = config.limits.topic_bytes_max
            _topic_name(f"{key}.default-topic", connector.default_topic, limit)
        big = config.limits.message_bytes_max > DETECTABLE_MESSAGE_BYTES_MAX
        if big and len(connector.protocols) > 1:
            text = (
                f"{key}.speaks must name one protocol while limits.message-bytes-max is over "
                "256 MiB: larger messages make the first bytes of protocols ambiguous"
            )
            raise ConfigError("config.invalid", text)
    _check_hosts(config.http.hosts)
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
        # Not `<= 0`: TOML has NaN.
        if not value > 0:
            text = f"{key}.{field.encode_name} is {value}; it must be greater than 0"
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


def _topic_name(key: str, name: str, bytes_max: int) -> str:
    """The canonical name of a topic that clients may write. Raises ConfigError."""
    try:
        found = names.canonical(name, topic_bytes_max=bytes_max)
        names.check_creatable(found)
    except UsageError as error:
        raise ConfigError("config.topic", f"{key}: {name!r}: {error.text}") from error
    if names.is_reserved(found):
        raise ConfigError("config.topic", f"{key}: {name!r}: {RESERVED}")
    return found


def _check_not_queue(connector: Connector, key: str) -> None:
    defaults = Connector()
    for field in ("topic", "account", "token_required"):
        if getattr(connector, field) != getattr(defaults, field):
            shown = f"{key}.{field.replace('_', '-')}"
            raise ConfigError("config.invalid", f"{shown} is only for queue connectors")


def _check_queue(connector: Connector, key: str) -> None:
    if connector.account != names.ACCOUNT and not names.is_account(connector.account):
        raise ConfigError("config.invalid", f"{key}.account: {connector.account!r} is no account")
    if connector.topic is None:
        raise ConfigError("config.invalid", f"{key}.topic is missing: a queue connector needs one")
    if len(connector.protocols) > 1:
        raise ConfigError("config.invalid", f"{key}.speaks: queue cannot share a connector")
    if connector.protocol != "tcp":
        raise ConfigError("config.invalid", f"{key}.protocol: a queue connector uses tcp")


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


def _accept_old_spellings(raw: dict[str, Any]) -> None:
    connectors = raw.get("connectors")
    for number, connector in enumerate(connectors if isinstance(connectors, list) else []):
        if isinstance(connector, dict) and "protocoll" in connector:
            if "protocol" in connector:
                text = f"connectors[{number}]: set protocol or protocoll, not both"
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
        except (msgspec.DecodeError, UnicodeDecodeError):
            target[path[-1]] = text


def _say(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key in front: `limits.x: expected int, got str`."""
    text, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    return f"{where}: {text}" if where else text
