"""Blocking HTTP calls to the bus, for Spark drivers, tasks and tools without an event loop.

    url = bus_url(data)                      # where the bus of a data folder listens
    text = request_json(url, "GET", "/v1/topics", token=read_token(data))

A refusal is raised as the bus's error, with its code and text. A bus that cannot be reached is
`client.unreachable`; one that disconnects during a call is `client.disconnected`.
"""

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from polybus.client.connection import TLS_ALERT, tls_required, without_tls
from polybus.client.http.connection import JSON, refused
from polybus.client.options import parse
from polybus.errors import PolybusError, UsageError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
GONE = ("client.unreachable", "client.disconnected")
"""The codes of a bus that is unreachable, as opposed to one that refuses."""
RUN_NOTE = "run.json"
TOKEN_FILE = "admin.token"

Body = bytes | BinaryIO | Iterator[bytes] | None


def bus_url(data: Path) -> str:
    """The HTTP address of the running bus of a data folder.

    Raises:
        UsageError: `client.unreachable`, no bus runs on the folder, or no connector speaks HTTP.
    """
    note = data / RUN_NOTE
    try:
        run = json.loads(note.read_bytes())
    except (OSError, ValueError) as error:
        text = f"no bus runs on {data} ({note.name} is missing): start it with polybus serve"
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            text = f"cannot read {note}: {error.strerror}"
        raise UsageError("client.unreachable", text) from error
    addresses = run.get("http")
    if not addresses:
        text = f"the bus on {data} has no connector that speaks http; add one to its connectors"
        raise UsageError("client.unreachable", text)
    return str(addresses[0]).replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def read_token(data: Path) -> str | None:
    """The administrator's token of a data folder, if this process may read it."""
    try:
        return (data / TOKEN_FILE).read_text().strip() or None
    except OSError:
        return None


def request(  # noqa: PLR0913 - all but the first three named by the caller
    url: str,
    method: str,
    path: str,
    body: Body = None,
    *,
    token: str | None = None,
    content_type: str = JSON,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> bytes:
    """One call; returns the body of the answer.

    Raises:
        UsageError: `client.url`; or the bus's refusal, with its code and text.
        BusyError, StorageError: the bus cannot do it now, with its code.
        PolybusError: `client.unreachable`, `client.disconnected` or `client.answer-invalid`.
    """
    head = {"accept": JSON, "content-type": content_type}
    if token is not None:
        head["authorization"] = f"Bearer {token}"
    with opened(url, method, path, body, headers=head, timeout_s=timeout_s) as answer:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise _disconnected(url, error) from error


def request_json(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Any:
    """One call with JSON in both directions; None if the answer has no body."""
    content = None if body is None else json.dumps(body).encode()
    answer = request(url, method, path, content, token=token, timeout_s=timeout_s)
    return json.loads(answer) if answer else None


@contextlib.contextmanager
def opened(  # noqa: PLR0913 - all but the first three named by the caller
    url: str,
    method: str,
    path: str,
    body: Body = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
    tls: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """A call whose answer the caller reads as a stream. Raises like `request`."""
    connection = _connect(url, timeout_s, tls)
    prefix = urlsplit(url).path.rstrip("/")
    try:
        try:
            connection.request(method, prefix + path, body=body, headers=headers or {})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            # A bus that refuses a large body answers and closes before it has read all of it.
            if isinstance(error, http.client.BadStatusLine) and _is_alert(error):
                raise tls_required(parse(url)) from error
            raise _early_answer(connection) or _disconnected(url, error) from error
        if answer.status >= 300:
            raise _refusal(answer)
        yield answer
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket, whose quoted path is the host of an http+unix URL."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(self._path)


def _connect(
    url: str, timeout_s: float, tls: ssl.SSLContext | None = None
) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError("client.url", f"url {url!r}: {error}") from error
    if parts.scheme not in ("http", "https", "http+unix") or not host:
        raise UsageError("client.url", f"url {url!r} must be like http://127.0.0.1:55545")
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
    if parts.scheme == "http+unix":
        connection = _UnixConnection(unquote(parts.netloc))
    elif parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=tls)
    try:
        connection.connect()
    except OSError as error:
        text = f"no bus answers at {url}: {error}"
        if parts.scheme == "https" and (why := without_tls(error, f"http://{parts.netloc}")):
            text = f"{url}: {why}"
        raise PolybusError("client.unreachable", text) from error
    connection.sock.settimeout(timeout_s)
    return connection


def _is_alert(error: http.client.BadStatusLine) -> bool:
    return str(error.args[0]).startswith(TLS_ALERT.decode())


def _early_answer(connection: http.client.HTTPConnection) -> PolybusError | None:
    """The refusal that the bus sent before it closed a connection that was still sending."""
    if connection.sock is None:
        return None
    answer = http.client.HTTPResponse(connection.sock)
    try:
        answer.begin()
        return _refusal(answer) if answer.status >= 300 else None
    except (OSError, http.client.HTTPException):
        return None


def _disconnected(url: str, error: BaseException) -> PolybusError:
    text = f"the bus at {url} disconnected during a call: {error or type(error).__name__}"
    return PolybusError("client.disconnected", text)


def _refusal(answer: http.client.HTTPResponse) -> PolybusError:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = answer.read()
    return refused(answer.status, body)
