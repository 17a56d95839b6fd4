"""Logins: an account whose connections carry the load, and visitors who log in beside it.

The passwords of visitors differ, and so do their hashes: the first login of each is checked by
argon2id, all later ones by the digest that the bus remembers. More visitors would measure the
thread that hashes, which is slower than the rate of logins.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from polybus.bench import BenchError
from polybus.log.layout import account_folder
from polybus.services.accounts.passwords import hash_of
from polybus.services.accounts.store import AccountStore

ACCOUNT = "bench"
VISITORS = 50
THREADS = 4
TIMEOUT_S = 30.0
_HEADER = struct.Struct(">ibH")


def prepare(data: Path, topics: list[str], visitors: int) -> str:
    """Create the account with these topics, and the visitors; return the account's token."""
    data.mkdir(parents=True, exist_ok=True)
    store = AccountStore(data)
    store.create(ACCOUNT, None, ())
    config = account_folder(data, ACCOUNT) / "config.json"
    config.write_text(json.dumps({"topics": topics}))
    for number in range(visitors):
        store.create(_visitor(number), hash_of(_visitor(number)), ())
    return store.make_token(ACCOUNT)


def _visitor(number: int) -> str:
    return f"visitor-{number}"


@contextlib.contextmanager
def logging_in(host: str, port: int, per_s: float) -> Iterator[None]:
    """Let visitors log in at a rate while the block runs; each has logged in once before it.

    Raises BenchError at its end if a login failed, or if there was none.
    """
    for number in range(VISITORS):
        if (answer := _log_in(host, port, _visitor(number))) != "$login":
            raise BenchError(f"a login failed: {answer}")
    stop, failures, done = threading.Event(), list[str](), list[int]()

    def log_in(first: int) -> None:
        began_s, number = time.monotonic(), first
        while not stop.wait(max(0.0, began_s + (number - first) / per_s - time.monotonic())):
            try:
                answer = _log_in(host, port, _visitor(number % VISITORS))
            except OSError as error:
                answer = str(error)
            if answer != "$login":
                failures.append(answer)
                return
            done.append(number)
            number += THREADS

    threads = [threading.Thread(target=log_in, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures or not done:
        raise BenchError(f"a login failed: {failures[0] if failures else 'none was answered'}")


def _log_in(host: str, port: int, name: str) -> str:
    """Log in with a connection of its own; return the topic of the answer."""
    content = f"{name}\n{name}".encode()
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as peer:
        peer.sendall(_HEADER.pack(len(content), 0, 6) + b"$login" + content)
        head = _read(peer, _HEADER.size)
        content_bytes, _, topic_bytes = _HEADER.unpack(head)
        topic = _read(peer, topic_bytes)
        _read(peer, content_bytes)
    return topic.decode(errors="replace")


def _read(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = peer.recv(size - len(found))
        if not some:
            raise ConnectionError("the bus closed the connection")
        found += some
    return found
