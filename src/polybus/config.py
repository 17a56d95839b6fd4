"""Settings: one frozen model, read from a TOML or JSON file and checked once.

goMS config files load unchanged (`topic-config`, `connectors` with `protocoll`). An unknown key is
an error that names the key. Environment variables `POLYBUS_…` override the file; two underscores
separate a group from its key: `POLYBUS_LIMITS__OUTBOX_BYTES_MAX=1048576`.

SIGHUP makes `polybus serve` read its settings again. `topics` (new ones are created),
`topic-config`, `retention`, `pipeline`, `tables` and the files of certificates take effect. Files
of certificates that change also take effect without it. Other keys keep their values until a
restart; the bus logs those that have changed. An invalid file changes nothing.
"""

from typing import Literal

import msgspec

from polybus import names
from polybus.errors import ConfigError, UsageError

PORT = 55545
RESERVED = "names that begin with `$` are reserved for system topics"
Speaks = Literal["goms", "boson-frames", "boson-properties", "http", "queue"]
DETECTED: tuple[Speaks, ...] = ("goms", "boson-frames", "boson-properties", "http")
SPARK_VARIABLES = ("POLYBUS_SPARK_ARCHIVE", "POLYBUS_SPARK_DRIVER", "POLYBUS_SPARK_RECORD")
# Environment variables of the scanner, of clients and of Spark's start: not settings of the bus.
NOT_SETTINGS = (
    *(
        "POLYBUS_PURE",
        "POLYBUS_URL",
        "POLYBUS_TOKEN",
        "POLYBUS_TOKEN_FILE",
        "POLYBUS_JAVA",
        *SPARK_VARIABLES,
    ),
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
    inline_references: bool = False
    """Give goMS clients the bytes of large payloads, not references that old clients do not know.
    Boson and queues always get the bytes."""
    tls: Tls | None = None
    """Encrypts the connections of this connector."""

    @property
    def protocols(self) -> tuple[Speaks, ...]:
        return (self.speaks,) if isinstance(self.speaks, str) else tuple(self.speaks)


class Limits(Settings, frozen=True):
    """Every limit and its default. docs/architecture.md says what happens when one is reached."""

    message_bytes_max: int = 64 << 20
    """Size of one message."""
    inline_bytes_max: int = 1 << 20
    """A larger payload is stored as a blob while it arrives, and its message is a reference."""
    blobs_max: int = 100_000
    """Blobs of the bus: each is a folder, and takes some memory."""
    uploads_max: int = 1000
    """Large payloads that arrive at a time."""
    unfinished_uploads_max: int = 100
    """Interrupted uploads by one sender to the topics of one account, which may be continued."""
    unfinished_upload_s: float = 86_400.0
    """How long the bytes of such an upload are kept."""
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
    """A UDP address that sends nothing for this time is forgotten; beyond loopback, also one that
    sends no proof."""
    detect_timeout_s: float = 10.0
    """How long after its first byte a connection may take to show its protocol."""
    login_timeout_s: float = 60.0
    """How long a connection may take to log in, where it must."""
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
    """Connections that are logged in to one account. Each `account-…` limit applies to every
    account but the default one, and the account's own config may set another.
    """
    account_sessions_max: int = 10_000
    """Open sessions of one account."""
    account_topics_max: int = 10_000
    """Topics of one account."""
    account_bytes_max: int = 1 << 40
    """Size of the messages and blobs of one account; beyond it publishes to its topics are refused.
    """
    account_messages_per_s_max: int = 100_000_000
    """Messages that one account publishes per second."""
    account_bytes_per_s_max: int = 100 << 30
    """Bytes that one account publishes per second."""
    account_consumers_max: int = 100
    """Consumer groups of one account."""
    account_producers_max: int = 1000
    """Transaction producers of one account whose last batch is remembered."""
    account_staging_bytes_max: int = 1 << 30
    """Uploaded and uncommitted bytes of one account's transaction producers."""
    account_uploads_max: int = 100
    """Large payloads of one account that arrive at a time."""
    signups_per_address_hour_max: int = 10
    """Sign-ups from one address in an hour, if `accounts.signup` allows them at all."""
    signups_per_hour_max: int = 1000
    """Sign-ups from all addresses in an hour."""


AGE_S_MAX = 9e12
"""A greater age is taken for this one, 285,000 years: in microseconds it still fits 64 bits."""


def age_us(age_s: float) -> int:
    """An age in microseconds. Any greater one than AGE_S_MAX means forever, too."""
    return int(min(age_s, AGE_S_MAX) * 1_000_000)


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
    """The system topics `$events`, `$stats`, `$alerts`, `$audit`, `$metrics` and `$commits`,
    read-only for clients."""

    events: bool = True
    """Record deliveries, confirmations and other events in the topic `$events`."""
    metrics: bool = True
    """Append the figures of the bus to the topic `$metrics` every 10 seconds."""
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
    """How long queued messages wait for more if no publisher waits for a receipt; a quarter longer
    if no further message follows.
    """
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


class Mask(Settings, frozen=True):
    """Parts of messages that the HTTP API hides from all except administrators."""

    topics: str
    """A topic, or a pattern with `*`."""
    fields: list[str]
    """Paths in JSON values (`$.card.number`), `$` for whole values, `key`, and `header:NAME`."""


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
    masks: list[Mask] = []
    """Fields of messages that readers of the API do not see."""
    live_rows_per_s: int = 200
    """Messages of a topic that `/v1/live` shows a second; it counts the others."""
    live_subscriptions_max: int = 32
    """Subscriptions of one connection of `/v1/live`."""


class Otlp(Settings, frozen=True):
    """Metrics for an OpenTelemetry collector."""

    endpoint: str = ""
    """URL to which metrics are sent as OTLP/HTTP with JSON, for example
    `http://127.0.0.1:4318/v1/metrics`; if empty, none are sent."""
    interval_s: float = 60.0
    """Time between two reports."""


class Queries(Settings, frozen=True):
    """SQL and searches over HTTP, which run in separate processes."""

    workers_max: int = 3
    """Concurrent query processes; each runs one query. They start on demand."""
    time_s_max: float = 60.0
    """A query that takes longer is ended."""
    rows_max: int = 100_000
    """Rows of one answer."""
    memory_bytes_max: int = 512 << 20
    """Memory of one query."""
    idle_s: float = 60.0
    """An idle query process is ended after this time."""


class AccountSettings(Settings, frozen=True):
    """Who may use the bus without an account, and who may create one."""

    default: Literal["loopback", "off", "open"] = "loopback"
    """Who may use the default account without a login: clients on this machine, no one, or
    everyone. A bus with `open` that listens beyond loopback needs `--insecure`.
    """
    signup: bool = False
    """Whether anybody may create an account over HTTP."""


class LogLines(Settings, frozen=True):
    """What the bus writes to standard error."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object per line: `time`, `level`, `logger`, `message`, and the
    `exception` of a failure in the program."""
    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level that is written; `--verbose` means `info`."""


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
    schema_file: str | None = None
    """A file with the schema instead, in JSON Schema or Avro, relative to the config file."""
    message_id: str | None = None
    """Path of the id inside a JSON value, used to drop duplicates: `$.id`."""
    event_time: str | None = None
    """Path of the event time inside a JSON value: `$.sent.at`."""
    expect: dict[str, str] = {}
    """Conditions in SQL, by their names: messages that do not meet one are counted."""
    expect_or_drop: dict[str, str] = {}
    """Likewise, but such messages go to quarantine."""
    expect_or_fail: dict[str, str] = {}
    """Likewise, but such a message stops the topic in the pipeline."""

    @property
    def is_decoded_specially(self) -> bool:
        """Whether the pipeline needs more settings of the topic than its name."""
        plain = DeclaredTopic(name=self.name, retention=self.retention)
        return msgspec.structs.replace(self, schema_file=None) != plain


class KafkaTls(Settings, frozen=True):
    """TLS to the brokers, from PEM files."""

    ca: str | None = None
    """Path of the authorities that sign the brokers' certificates; by default the system's."""
    cert: str | None = None
    """Path of the node's own certificate chain, if the brokers ask for one."""
    key: str | None = None
    """Path of its private key, not encrypted."""


class KafkaLogin(Settings, frozen=True):
    """The login to the brokers, by SASL."""

    user: str
    """The user's name."""
    password_file: str
    """Path of a file with the password; white space around it does not count."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """How the password is checked. `PLAIN` sends it to the broker: use it with TLS only."""


class DeclaredTable(Settings, frozen=True):
    """What the rows of a table, view or sink of a user's pipeline should be."""

    name: str
    """Its name with that of the pipeline: `shop.orders`."""
    expect: dict[str, str] = {}
    """Conditions in SQL, by their names: rows that do not meet one are counted."""
    expect_or_drop: dict[str, str] = {}
    """Likewise, but such rows are left out."""
    expect_or_fail: dict[str, str] = {}
    """Likewise, but such a row fails the flow."""


class Cluster(Settings, frozen=True):
    """How a node uses the Kafka cluster that `log` names."""

    replicas: int = 3
    """Copies of a new topic, each on another broker."""
    insync_min: int = 2
    """Copies that must have a message before its receipt: `min.insync.replicas` of a new topic."""
    prefix: str = ""
    """Begins the names of all Kafka topics of this bus, so that several can share a cluster."""
    recent_bytes_max: int = 64 << 20
    """Memory for the newest messages of all topics; older ones are read from the brokers."""
    transaction_timeout_s: float = 30.0
    """A transaction that takes longer is aborted. When a node dies in the middle of one, readers of
    its topics wait that long, unless its producer asks another node. Up to Kafka's
    `transaction.max.timeout.ms`."""
    tls: KafkaTls | None = None
    """Encrypt the connections to the brokers."""
    login: KafkaLogin | None = None
    """Log in to the brokers."""


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
    log: str = "files"
    """Where messages are stored: `files` in the data directory, or a Kafka cluster that several
    nodes share, `kafka://host:port,host:port,…`. Then `durability` says what happens while too few
    replicas are in sync: `fsync` refuses publishes, `interval` lets them wait."""
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
    otlp: Otlp = Otlp()
    """Metrics for an OpenTelemetry collector."""
    queries: Queries = Queries()
    """SQL and searches over HTTP."""
    accounts: AccountSettings = AccountSettings()
    """Accounts and logins."""
    logging: LogLines = LogLines()
    """The lines on standard error."""
    pipeline: Pipeline = Pipeline()
    """The standard pipeline."""
    tables: list[DeclaredTable] = []
    """Expectations of tables of your own pipelines."""
    cluster: Cluster = Cluster()
    """Kafka under the log."""

    @property
    def is_cluster(self) -> bool:
        """Whether the log is shared by several nodes."""
        return self.log != "files"

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
            name = topic_name(key, topic.name, self.limits.topic_bytes_max)
            topics.setdefault(name, msgspec.structs.replace(topic, name=name))
        return list(topics.values())


def topic_name(key: str, name: str, bytes_max: int) -> str:
    """The canonical name of a topic that clients may write. Raises ConfigError."""
    try:
        found = names.canonical(name, topic_bytes_max=bytes_max)
        names.check_creatable(found)
    except UsageError as error:
        raise ConfigError("config.topic", f"{key}: {name!r}: {error.text}") from error
    if names.is_reserved(found):
        raise ConfigError("config.topic", f"{key}: {name!r}: {RESERVED}")
    return found
