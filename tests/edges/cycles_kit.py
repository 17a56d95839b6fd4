"""Clients for the test of cycles: plain sockets, and all that one may do with them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import socket
import ssl
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from edge_kit import frame, line, properties

from polybus.services.transactions.staging import SCHEMA

TLS = Path(__file__).parents[1] / "client" / "tls"
NOT_HTTP = b"GET /\x00 HTTP/9.9\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
# In a request: the bus closes after its answer.
LAST = "Connection: close"


@dataclass
class Bus:
    """The ports of a bus, and a session with packs that nobody confirms."""

    tcp: int
    udp: int
    queue: int
    tls: int
    key: str = ""

    def request(self, path: str, *lines: str, method: str = "GET", body: str = "") -> bytes:
        head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.tcp}", *lines]
        if body:
            head.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*head, "", body]).encode()

    def upgrade(self, key: str = "", path: str = "") -> bytes:
        return self.request(
            path or f"/msgstream?sessionKey={key or self.key}",
            *("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )

    def poll(self, transport: str, key: str = "") -> bytes:
        return self.request(f"/msgstream?sessionKey={key or self.key}&transport={transport}")


@contextlib.contextmanager
def open_socket(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        yield sock


def talk(port: int, data: bytes, *, until: bytes = b"") -> bytes:
    """Send, read until the bytes came, end our side, and read until the bus has closed."""
    said = b""
    # The bus may have reset the connection already.
    with open_socket(port) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        while until not in said:
            piece = sock.recv(1 << 16)
            assert piece, said
            said += piece
        if LAST.encode() not in data:
            sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(1 << 16):
            said += piece
    return said


def reset(port: int, data: bytes, until: bytes) -> None:
    """Send, read until the bytes came, and disconnect."""
    said = b""
    with open_socket(port) as sock:
        sock.sendall(data)
        while until not in said:
            said += sock.recv(1 << 16)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


SUBSCRIBED = frame("$subscribe", b"news tell=position") + frame("news?receipt=7", b"x")
REPLAYED = frame("$subscribe", b"news from=earliest")
PUBLISHED = properties(("hbfs", b"news")) + properties(
    ("topic", b"news"), ("content", b"x"), ("hbfr", b"7")
)
REGISTERED = line("register", topics=["news"], ack=True) + line(
    "send", topics=["news"], data="x", ack=True
)


def gzipped(bus: Bus) -> None:
    talk(bus.tcp, gzip.compress(SUBSCRIBED))


def refused_by_number(bus: Bus) -> None:
    """More connections than `connections-max`."""
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            sock = stack.enter_context(open_socket(bus.tcp))
            with contextlib.suppress(ConnectionError):
                sock.sendall(frame("news", b"x"))


def over_tls(bus: Bus, data: bytes, until: bytes) -> None:
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    context.check_hostname = False
    with open_socket(bus.tls) as plain, context.wrap_socket(plain) as sock:
        sock.sendall(data)
        said = b""
        while until not in said:
            said += sock.recv(1 << 16)


def over_udp(bus: Bus) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(20)
        sock.connect(("127.0.0.1", bus.udp))
        for data, until in (
            (line("register", topics=["news"], ack=True), b"reg-ack"),
            (b"{]", b"error"),
            (line("send", topics=["news"], data="x", ack=True), b"send-ack"),
            (line("logout", topics=["news"]) + b"{]", b"error"),
        ):
            sock.send(data)
            while until not in sock.recv(1 << 16):
                pass


def never_reads(bus: Bus) -> None:
    """A subscriber that the bus disconnects, and a publisher that is held back for it."""
    with socket.socket() as slow, open_socket(bus.tcp) as fast:
        slow.settimeout(20)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", bus.tcp))
        slow.sendall(frame("$subscribe", b"flood tell=position"))
        slow.recv(1)
        for _ in range(32):
            fast.sendall(frame("flood", bytes(1 << 18)))
        fast.sendall(frame("flood?receipt=7", b""))
        fast.recv(1)


def stalled_replay(bus: Bus) -> None:
    with socket.socket() as slow:
        slow.settimeout(20)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", bus.tcp))
        slow.sendall(frame("$subscribe", b"large from=earliest"))
        slow.recv(1)


def hanging(bus: Bus, request: bytes) -> None:
    """A request that waits for what never comes, until its client is gone."""
    with open_socket(bus.tcp) as sock:
        sock.sendall(request)
        sock.settimeout(0.02)
        with contextlib.suppress(TimeoutError):
            sock.recv(1)


def new_session(bus: Bus, body: str = "{}") -> str:
    made = bus.request("/v1/sessions", LAST, method="POST", body=body)
    said = talk(bus.tcp, made)
    return str(json.loads(said.partition(b"\r\n\r\n")[2])["sessionKey"])


def websocket(bus: Bus, *frames: bytes, until: bytes = b'"1":') -> bytes:
    """Open the session's WebSocket, read a pack, and send frames that end it."""
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade())
        said = b""
        while until not in said:
            said += sock.recv(1 << 16)
        sock.sendall(b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 16):
                said += piece
    return said


def live(bus: Bus, *frames: bytes) -> None:
    """A page that follows figures and a topic, until frames end it or it is gone."""
    asked = [b'{"op":"subscribe","id":1,"channel":"figures"}']
    asked += [b'{"op":"subscribe","id":2,"channel":"tail","topic":"nix"}', b"{"]
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade(path="/v1/live"))
        said = b""
        while b"\r\n\r\n" not in said:
            said += sock.recv(1 << 16)
        sock.sendall(b"".join(ws_frame(1, text) for text in asked))
        while b'"figures"' not in said or b"topic.unknown" not in said:
            said += sock.recv(1 << 16)
        sock.sendall(b"".join(frames))


def followed(bus: Bus) -> None:
    """A page that follows a topic which gets a message."""
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade(path="/v1/live"))
        said = b""
        while b"\r\n\r\n" not in said:
            said += sock.recv(1 << 16)
        sock.sendall(ws_frame(1, b'{"op":"subscribe","id":1,"channel":"tail","topic":"news"}'))
        while b'"tail"' not in said:
            sock.settimeout(0.05)
            # Published until the subscription is there.
            asked(bus, "/v1/topics/news/messages", method="POST", body="x")
            with contextlib.suppress(TimeoutError):
                said += sock.recv(1 << 16)


def asked(bus: Bus, path: str, *lines: str, method: str = "GET", body: str | bytes = b"") -> bytes:
    """The body of an answer that is a success."""
    content = body.encode() if isinstance(body, str) else body
    length = f"Content-Length: {len(content)}"
    head, _, answer = talk(
        bus.tcp, bus.request(path, LAST, length, *lines, method=method) + content
    ).partition(b"\r\n\r\n")
    assert head.split()[1][:1] == b"2", head + answer
    return answer


def committed(bus: Bus) -> None:
    """A transaction of a staged file, and the same once more."""
    batch = next(BATCHES)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        row = {"topic": "news", "key": None, "value": b"staged", "headers": None}
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema=SCHEMA))
    file = f"{batch}-{batch:032}.arrows"
    path = f"/v1/staging/cycles/{file}?end=true"
    asked(bus, path, method="POST", body=sink.getvalue().to_pybytes())
    wanted = {"producer": "cycles", "query": "q", "batch": batch, "files": [file]}
    for _ in range(2):
        asked(bus, "/v1/commits", method="POST", body=json.dumps(wanted))
    asked(bus, "/v1/commits/cycles")


def continued(bus: Bus) -> None:
    """A large payload that is interrupted and is continued."""
    payload = f"{next(BATCHES)}".encode() * (1 << 19)
    path = f"{BLOB_PATH}?sha256={hashlib.sha256(payload).hexdigest()}"
    length = f"Content-Length: {len(payload)}"
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.request(path, length, method="PUT") + payload[: len(payload) // 2])
    start, answer = 0, b""
    while b'"reference"' not in answer:
        start = json.loads(asked(bus, path))["bytes"]
        request = bus.request(
            f"{path}&from={start}", LAST, f"Content-Length: {len(payload) - start}", method="PUT"
        )
        # Until the bus has noticed the end of the first connection it is refused.
        answer = talk(bus.tcp, request + payload[start:])


def sql(bus: Bus, query: str, *lines: str) -> bytes:
    body = json.dumps({"query": query})
    length = f"Content-Length: {len(body)}"
    return bus.request("/v1/sql", length, *lines, method="POST") + body.encode()


def two_websockets(bus: Bus) -> None:
    """The second takes the session over."""
    with open_socket(bus.tcp) as first:
        first.sendall(bus.upgrade())
        first.recv(1 << 16)
        websocket(bus, ws_frame(8, b"\x03\xe8"))


def ended_session(bus: Bus) -> None:
    key = new_session(bus)
    with open_socket(bus.tcp) as sock:
        sock.sendall(bus.upgrade(key))
        sock.recv(1 << 16)
        talk(bus.tcp, bus.request(f"/v1/sessions/{key}", LAST, method="DELETE"))
        assert sock.recv(1 << 16)


def ws_frame(opcode: int, data: bytes, *, fin: int = 0x80) -> bytes:
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([opcode | fin]) + size + bytes(4) + data


RIGHT = f"Basic {b64encode(b'default:right').decode()}"
WRONG = f"Basic {b64encode(b'default:wrong').decode()}"
BEHIND = '{"topics":["large"],"from":"earliest"}'
Scenario = Callable[[Bus], object]
BLOB_PATH = "/v1/topics/flood/blob"
LARGE_FRAME = frame("flood?receipt=1", bytes(2 << 20))
LARGE_ID = hashlib.sha256(bytes(2 << 20)).hexdigest()
ACCEPT_ARROW = "Accept: application/vnd.apache.arrow.stream"
BATCHES = itertools.count()
LARGE_SEND = line("register", topics=["flood"]) + line(
    "send", topics=["flood"], data="x" * (2 << 20), ack=True
)
SCENARIOS: dict[str, Scenario] = {
    "nothing said": lambda bus: talk(bus.tcp, b""),
    "no protocol": lambda bus: talk(bus.tcp, b"\xff" * 64),
    "half a first byte": lambda bus: talk(bus.tcp, b"\0\0"),
    "refused by number": refused_by_number,
    "frames": lambda bus: talk(bus.tcp, SUBSCRIBED, until=b"$receipt"),
    "frames, interrupted": lambda bus: reset(bus.tcp, SUBSCRIBED, b"$receipt"),
    "frames, unfinished": lambda bus: talk(bus.tcp, frame("news", bytes(1 << 20))[:-1]),
    "frames, everything": lambda bus: talk(
        bus.tcp, frame("$subscribe", b"* tell=position"), until=b"news"
    ),
    "frames, replay": lambda bus: talk(bus.tcp, REPLAYED, until=b"first"),
    "frames, replay interrupted": stalled_replay,
    "frames, unknown topic": lambda bus: talk(bus.tcp, frame("none", b"x"), until=b"$error"),
    "frames, bad": lambda bus: talk(bus.tcp, SUBSCRIBED + b"\xff" * 64, until=b"$error"),
    "frames, bad words": lambda bus: talk(
        bus.tcp,
        frame("$subscribe", b"news from=never") + frame("$subscribe", b"\xff") + frame("$x"),
        until=b"$error",
    ),
    "frames, gzip": gzipped,
    "gzip, bad": lambda bus: talk(bus.tcp, gzip.compress(SUBSCRIBED)[:12] + b"\xff" * 64),
    "gzip, nothing in it": lambda bus: talk(bus.tcp, gzip.compress(b"\xff" * 64)),
    "a subscriber that never reads": never_reads,
    "properties": lambda bus: talk(bus.tcp, PUBLISHED, until=b"hbfr"),
    "properties, bad": lambda bus: talk(
        bus.tcp, PUBLISHED + properties(("hbff", b"9"), ("hbfr", b"8")) + b"\xff" * 64
    ),
    "goms": lambda bus: talk(bus.tcp, REGISTERED, until=b"send-ack"),
    "goms, interrupted": lambda bus: reset(bus.tcp, REGISTERED, b"send-ack"),
    "goms, bad": lambda bus: talk(
        bus.tcp, REGISTERED + b'{]\n{"messagetype":"?"}\n{"messagetype":7}\n\xff{"', until=b"error"
    ),
    "goms, replay": lambda bus: talk(
        bus.tcp, line("register", topics=["news"], **{"from": "earliest"}), until=b"first"
    ),
    "goms, udp": over_udp,
    "queue": lambda bus: talk(bus.queue, struct.pack(">i", 1) + b"x"),
    "queue, bad": lambda bus: talk(bus.queue, b"\xff" * 64),
    "tls": lambda bus: over_tls(bus, SUBSCRIBED, b"$receipt"),
    "tls, gzip": lambda bus: over_tls(bus, gzip.compress(SUBSCRIBED), b""),
    "tls, http": lambda bus: over_tls(bus, bus.request("/healthz"), b"200"),
    "tls, bad": lambda bus: talk(bus.tls, b"\x16\x03\x01\x00\x05" + b"\xff" * 64),
    "tls, bad inside": lambda bus: over_tls(bus, b"\xff" * 64, b""),
    "http": lambda bus: talk(
        bus.tcp, bus.request("/v1/topics") + bus.request("/healthz"), until=b"ok"
    ),
    "http, last request": lambda bus: talk(bus.tcp, bus.request("/", LAST)),
    "http, interrupted": lambda bus: reset(bus.tcp, bus.request("/v1/topics"), b"news"),
    "http, publish": lambda bus: talk(
        bus.tcp, bus.request("/v1/topics/news/messages", LAST, method="POST", body="x")
    ),
    "http, fetch": lambda bus: talk(bus.tcp, bus.request("/v1/topics/news/messages", LAST)),
    "http, arrow": lambda bus: asked(bus, "/v1/topics/news/messages?offset=0", ACCEPT_ARROW),
    "http, fetch that waits": lambda bus: hanging(
        bus, bus.request("/v1/topics/quiet/messages?offset=0&wait-s=0.01")
    ),
    "http, problems": lambda bus: [
        talk(bus.tcp, bus.request(path, LAST, method=method, body=body))
        for method, path, body in (
            ("GET", "/none", ""),
            ("PATCH", "/v1/topics", ""),
            ("GET", "/v1/topics/none", ""),
            ("GET", "/v1/topics/news/messages?offset=x", ""),
            ("GET", "/v1/topics/news/messages?offset=999999", ""),
            ("POST", "/v1/sessions", "{]"),
            ("POST", "/v1/sessions", '{"topics":["none"]}'),
            ("POST", "/v1/topics/none/messages", "x"),
            ("DELETE", "/v1/sessions/none", ""),
            ("GET", "/v1/commits/none", ""),
        )
    ],
    "http, logins": lambda bus: [
        talk(bus.tcp, bus.request(path, LAST, f"Authorization: {header}", method=method, body=body))
        for header in (RIGHT, WRONG, "Bearer none", "Basic ?")
        for method, path, body in (
            ("GET", "/v1/topics", ""),
            ("GET", "/v1/accounts", ""),
            ("POST", "/v1/topics/news/messages", "x"),
            ("POST", "/v1/signup", "{}"),
        )
    ],
    "http, bad": lambda bus: talk(bus.tcp, NOT_HTTP),
    "http, head too large": lambda bus: talk(bus.tcp, bus.request("/" + "x" * 10_000)),
    "http, body unfinished": lambda bus: talk(
        bus.tcp, bus.request("/v1/sessions", method="POST", body="{}")[:-1]
    ),
    "sessions": ended_session,
    "poll": lambda bus: talk(bus.tcp, bus.poll("shortpolling"), until=b'"1":'),
    "poll, long": lambda bus: talk(bus.tcp, bus.poll("longpolling"), until=b'"1":'),
    "poll, hanging": lambda bus: hanging(bus, bus.poll("longpolling", new_session(bus))),
    "poll, unknown session": lambda bus: talk(bus.tcp, bus.poll("longpolling", "none")),
    "websocket": lambda bus: websocket(bus, ws_frame(8, b"\x03\xe8")),
    "websocket, interrupted": lambda bus: reset(bus.tcp, bus.upgrade(), b'"1":'),
    # Its packs are not in memory: the bus reads the log for them.
    "websocket, interrupted early": lambda bus: reset(
        bus.tcp, bus.upgrade(new_session(bus, BEHIND)), b"101"
    ),
    "poll, interrupted early": lambda bus: reset(
        bus.tcp, bus.poll("longpolling", new_session(bus, BEHIND)), b""
    ),
    "live": lambda bus: live(bus, ws_frame(8, b"\x03\xe8")),
    "live, no goodbye": lambda bus: live(bus),
    "live, a topic": followed,
    "websocket, no goodbye": lambda bus: websocket(bus),
    "websocket, bad": lambda bus: [
        websocket(bus, *frames)
        for frames in (
            (b"\xff" * 64,),
            (ws_frame(1, b"\xff\xff", fin=0), ws_frame(2, b"x")),
            (ws_frame(1, b"\xff\xff"),),
            (ws_frame(2, b"x"),),
            (ws_frame(1, b"x" * 5000),),
            (ws_frame(1, b"[]"), ws_frame(9, b"x"), b"\x81\x05hello"),
        )
    ],
    "websocket, refused": lambda bus: [
        talk(bus.tcp, bus.upgrade("none")),
        talk(bus.tcp, bus.upgrade().replace(b"Version: 13", b"Version: 7")),
        talk(bus.tcp, bus.upgrade().replace(b"/msgstream", b"/elsewhere")),
    ],
    "websocket, taken over": two_websockets,
    "http, blob": lambda bus: [
        talk(bus.tcp, bus.request(BLOB_PATH, LAST, method="PUT", body="y" * (2 << 20))),
        talk(bus.tcp, bus.request(BLOB_PATH, method="PUT", body="y" * (2 << 20))[:-1]),
        talk(bus.tcp, bus.request(f"/v1/blobs/{LARGE_ID}", LAST)),
        talk(bus.tcp, bus.request(f"/v1/blobs/{LARGE_ID}", "Range: bytes=9-", LAST)),
    ],
    "http, blob interrupted": lambda bus: reset(
        bus.tcp, bus.request(f"/v1/blobs/{LARGE_ID}"), b" 200 "
    ),
    "http, arrow interrupted": lambda bus: reset(
        bus.tcp, bus.request("/v1/topics/large/messages?offset=0", ACCEPT_ARROW), b" 200 "
    ),
    "http, blob continued": continued,
    "http, staging and commit": committed,
    "http, sql": lambda bus: [
        talk(bus.tcp, sql(bus, "SELECT value FROM news LIMIT 1", LAST), until=b" 200 "),
        talk(bus.tcp, sql(bus, "SELECT nothing FROM nowhere", LAST), until=b" 400 "),
    ],
    "http, search": lambda bus: [
        asked(bus, "/v1/topics/news/search?text=first"),
        asked(bus, "/v1/topics/news/histogram?bins=3"),
        talk(bus.tcp, bus.request("/v1/topics/news/search?sql=(", LAST), until=b" 400 "),
    ],
    "http, export": lambda bus: asked(bus, "/v1/topics/news/export?format=jsonl"),
    "http, export interrupted": lambda bus: reset(
        bus.tcp, bus.request("/v1/topics/large/export?format=jsonl"), b" 200 "
    ),
    "frames, large": lambda bus: talk(bus.tcp, LARGE_FRAME, until=b"$receipt"),
    "frames, large to itself": lambda bus: talk(
        bus.tcp, frame("$subscribe", b"flood") + LARGE_FRAME, until=b"$receipt"
    ),
    "frames, large unfinished": lambda bus: talk(bus.tcp, LARGE_FRAME[:-1]),
    "frames, large interrupted": lambda bus: reset(bus.tcp, LARGE_FRAME, b"$receipt"),
    "frames, large and refused": lambda bus: talk(
        bus.tcp, frame("none", bytes(2 << 20)), until=b"$error"
    ),
    "goms, large": lambda bus: talk(bus.tcp, LARGE_SEND, until=b"send-ack"),
    "goms, download": lambda bus: talk(
        bus.tcp, line("download", id=LARGE_ID, bytes=10) + line("download", id="x"), until=b"004001"
    ),
}
