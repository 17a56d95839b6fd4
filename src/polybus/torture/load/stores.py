"""The load on the stores beside the log: large payloads, accounts, consumers, a Delta table.

Like the rest of the load (load.py) it ends when the bus dies, and the next bus is checked against
its promises. A request that got no answer may have been done or not.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Collection, Container, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from polybus.client.options import Credentials
from polybus.errors import PolybusError, StorageError
from polybus.log.history import exposed
from polybus.log.layout import admin_token_path, exposed_folder, topic_folder
from polybus.torture.bus.child import TOPICS, BusChild, ask_on, shown
from polybus.torture.load.side_load import SideLoad
from polybus.torture.report import Findings

PAYLOADS = "payloads"
SHARED = "shared"
"""Has messages with some payloads of the other topic."""
PASSING = "passing"
# The first has more than one block with a checksum of its own.
SIZES = (300 << 10, 5000, 5000, 70 << 10)
PAYLOADS_MAX = 40
"""All are read again after each fault."""
KEPT_MAX = 3
OWN = "own"
GROUP = "torture"
EXPOSED = TOPICS[0]
PAUSES = 4
"""The load of this module pauses this many times as long as the writers of messages."""
ATTEMPTS_MAX = 50
EXPOSE_S_MAX = 20.0
RIGHT, WRONG = "right", "wrong"
# Each costs the bus the time of a slow hash.
PASSWORDS_SHARE = 0.3
# The bus has not yet noticed that the peer is gone, or has written less than the peer has sent.
RETRIED = ("blob.arriving", "blob.position")


@dataclass
class KnownAccount:
    """An existing account with a token, a message and a large payload."""

    token: str
    value: str
    blob_id: str
    passwords: tuple[str, str] | None = None
    """The one before, and the present one."""


@dataclass
class StoresLoad(SideLoad):
    """Accounts, large payloads, a consumer and a table, and what was promised of them."""

    blobs: list[str] = field(default_factory=list)
    """The ids of those with a receipt."""
    _payloads: int = 0
    accounts: dict[str, KnownAccount] = field(default_factory=dict)
    _accounts: int = 0
    _deleted: set[str] = field(default_factory=set)
    _revoked: list[str] = field(default_factory=list)
    _ungranted: set[tuple[str, str]] = field(default_factory=set)
    _reported: int = 0
    _tried: int = 0
    _is_exposed: bool = False

    def jobs(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self._put_blobs, self._change_accounts, self._report, self._expose]

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(self._chance.uniform(0, PAUSES * pause_s))

    async def ask(
        self, method: str, path: str, body: bytes | Any = None, *, token: str = ""
    ) -> Any:
        """As `BusChild.ask`, with a token, or with bytes."""
        return await _ask(self._child, method, path, body, token=token)

    # Large payloads.

    async def _put_blobs(self) -> None:
        if not self._payloads:
            for topic in (PAYLOADS, SHARED):
                with contextlib.suppress(PolybusError):
                    await self.ask("POST", "/v1/topics", {"name": topic})
        while not self._stopping.is_set() and self._payloads < PAYLOADS_MAX:
            payload = payload_of(self._payloads)
            self._payloads += 1
            if self._chance.random() < 0.3:
                stored = await self._put_in_two(payload)
            else:
                stored = await self.ask("PUT", f"/v1/topics/{PAYLOADS}/blob", payload)
            self.blobs.append(stored["reference"]["id"])
            if self._payloads % 3 == 0:
                await self.ask("PUT", f"/v1/topics/{SHARED}/blob", payload)
            elif self._payloads % 3 == 1:
                # The payload stays when one of its topics goes.
                topic = f"{PASSING}-{self._payloads}"
                await self.ask("POST", "/v1/topics", {"name": topic})
                await self.ask("PUT", f"/v1/topics/{topic}/blob", payload)
                await self.ask("DELETE", f"/v1/topics/{topic}")
            await self._pause(0.1)

    async def _put_in_two(self, payload: bytes) -> Any:
        """Send half of a payload, disconnect, and continue."""
        digest = hashlib.sha256(payload).hexdigest()
        path = f"/v1/topics/{PAYLOADS}/blob?sha256={digest}"
        _, writer = await asyncio.open_connection("127.0.0.1", self._child.port)
        head = f"PUT {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload[: len(payload) // 2])
        await writer.drain()
        writer.close()
        for attempt in range(ATTEMPTS_MAX):
            try:
                start = (await self.ask("GET", path))["bytes"]
                return await self.ask("PUT", f"{path}&from={start}", payload[start:])
            except PolybusError as error:
                if error.code not in RETRIED or attempt == ATTEMPTS_MAX - 1:
                    raise
            await asyncio.sleep(0.02)

    # Accounts.

    @property
    def _admin(self) -> str:
        return admin_token_path(self._child.data).read_text().strip()

    async def _change_accounts(self) -> None:
        while not self._stopping.is_set():
            self._accounts += 1
            name = f"shop{self._accounts}"
            # Small, so that it is not a reference: the account has a large payload, too.
            value = f"the message of {name}"
            await self.ask("POST", "/v1/accounts", {"name": name}, token=self._admin)
            made = await self.ask("POST", f"/v1/accounts/{name}/tokens", {}, token=self._admin)
            token = made["token"]
            await self.ask("POST", "/v1/topics", {"name": OWN}, token=token)
            await self.ask("POST", f"/v1/topics/{OWN}/messages", value.encode(), token=token)
            payload = f"{name}.".encode() * 1000
            stored = await self.ask("PUT", f"/v1/topics/{OWN}/blob", payload, token=token)
            for other in self.accounts:
                grant = {"to": name, "topics": OWN, "rights": ["subscribe"]}
                await self.ask("POST", f"/v1/accounts/{other}/grants", grant, token=self._admin)
                if self._chance.random() < 0.5:
                    path, old = f"/v1/accounts/{other}/grants", {"to": name, "topics": OWN}
                    await self.ask("DELETE", path, old, token=self._admin)
                    self._ungranted.add((other, name))
            if len(self.accounts) < KEPT_MAX and self._chance.random() < 0.5:
                known = KnownAccount(token, value, stored["reference"]["id"])
                await self._change_login(name, known)
                self.accounts[name] = known
            else:
                await self.ask("DELETE", f"/v1/accounts/{name}", token=self._admin)
                self._deleted.add(name)
            await self._pause(0.1)

    async def _change_login(self, name: str, known: KnownAccount) -> None:
        """Revoke another token of an account; the first one changes its password, too."""
        path = f"/v1/accounts/{name}"
        made = await self.ask("POST", f"{path}/tokens", {}, token=self._admin)
        await self.ask("DELETE", f"{path}/tokens/{made['id']}", token=self._admin)
        self._revoked.append(made["token"])
        if not self.accounts:
            known.passwords = (f"before of {name}", f"now of {name}")
            for password in known.passwords:
                body = {"password": password}
                await self.ask("PUT", f"{path}/password", body, token=self._admin)

    # A consumer.

    async def _report(self) -> None:
        epoch = (await self.ask("GET", f"/v1/topics/{TOPICS[0]}"))["epoch"]
        while not self._stopping.is_set():
            known = self._messages.receipted[TOPICS[0]].values()
            end = max((offset for offset in known if offset is not None), default=-1) + 1
            self._tried = max(self._tried, end)
            positions = {TOPICS[0]: {"epoch": epoch, "offset": self._tried}}
            await self.ask("PUT", f"/v1/consumers/{GROUP}", {"positions": positions})
            self._reported = self._tried
            await self._pause(0.1)

    # The history of a topic as a table.

    async def _expose(self) -> None:
        """Once, as a user does."""
        if self._is_exposed:
            return
        self._is_exposed = await self._done_by_user(
            exposed.expose,
            *(self._child.data, EXPOSED),
            is_over=lambda: not self._child.is_alive,
            s_max=EXPOSE_S_MAX,
        )

    # Checks.

    async def check(self) -> None:
        """Compare the data of the bus with its promises. Raises PolybusError."""
        for blob_id, state in (await served_blobs(self._child, self.blobs)).items():
            if state != RIGHT:
                kind = "phantoms" if state == WRONG else "lost"
                self._findings.violated(kind, f"large payload {blob_id[:12]}: {state}")
        for name, state in (await self.served_accounts(self._child)).items():
            if state != RIGHT:
                kind = "phantoms" if state == WRONG else "lost"
                self._findings.violated(kind, f"account {name}: {state}")
        for name, known in self.accounts.items():
            if known.passwords is not None and self._chance.random() < PASSWORDS_SHARE:
                await self._check_passwords(name, known.passwords)
        if self._reported:
            offset = await position(self._child)
            if offset is None or not self._reported <= offset <= self._tried:
                text = f"a consumer was at {self._reported} to {self._tried}, and is at {offset}"
                self._findings.violated("lost", text)

    async def _check_passwords(self, name: str, passwords: tuple[str, str]) -> None:
        is_right = [await _logs_in(self._child, one, user=name) for one in passwords]
        if is_right[0]:
            self._findings.violated("deleted", f"the old password of account {name} is back")
        if not is_right[1]:
            self._findings.violated("lost", f"the password of account {name}")

    async def served_accounts(self, child: BusChild) -> dict[str, str]:
        """The state of each existing account on a bus: RIGHT, WRONG, or what is missing."""
        return {name: await _served_account(child, one) for name, one in self.accounts.items()}

    async def check_deleted(
        self, child: BusChild, findings: Findings, damaged: Container[str] = ()
    ) -> None:
        """Deleted accounts are gone, with topics and grants. Raises PolybusError."""
        admin = admin_token_path(child.data).read_text().strip()
        listed = (await _ask(child, "GET", "/v1/accounts", token=admin))["accounts"]
        there = {one["name"] for one in listed}
        granted = {grant["to"] for one in listed for grant in one["grants"]}
        topics = (await _ask(child, "GET", "/v1/topics", token=admin))["topics"]
        owners = {
            one["name"].partition("/")[0]
            for one in topics
            if one["name"] not in damaged or not one.get("damaged")
        }
        for owner, to in sorted(self._ungranted):
            if any(one["name"] == owner and _grants(one, to) for one in listed):
                findings.violated("deleted", f"the grant of account {owner} to {to} is back")
        for token in self._revoked:
            if await _logs_in(child, token):
                findings.violated("deleted", "a revoked token is back")
        for what, found in (("is", there), ("has grants and is", granted), ("has topics", owners)):
            for name in sorted(self._deleted & found):
                findings.violated("deleted", f"account {name} {what} back")

    async def check_table(self, stored: dict[int, str]) -> None:
        """The table of the topic has its messages up to one of them, each once."""
        folder = topic_folder(self._child.data, EXPOSED)
        if not self._is_exposed:
            return
        if not exposed.is_exposed(folder):
            self._findings.violated("lost", f"{EXPOSED} is no longer exposed")
            return
        for attempt in range(ATTEMPTS_MAX):
            try:
                rows = await asyncio.to_thread(table_rows, exposed_folder(folder))
                break
            except (OSError, StorageError) as error:
                # A clock that jumps lets the hand-over remove old files early.
                if attempt == ATTEMPTS_MAX - 1:
                    self._findings.violated("verify", f"the table of {EXPOSED}: {error}")
                    return
            await asyncio.sleep(0.02)
        rows = [(offset, self._messages.resolved(text)) for offset, text in rows]
        wrong = [offset for offset, text in rows if stored.get(offset) != text]
        if wrong:
            self._findings.violated("phantoms", f"the table of {EXPOSED} at {wrong[0]}")
        if [offset for offset, _ in rows] != list(range(len(rows))):
            self._findings.violated("order", f"the table of {EXPOSED} does not have each row once")


def payload_of(number: int) -> bytes:
    size = SIZES[number % len(SIZES)]
    return (f"{number}." * size)[:size].encode()


async def position(child: BusChild) -> int | None:
    """Where the consumer is. Raises PolybusError."""
    found = (await child.ask("GET", "/v1/consumers"))["consumers"]
    offsets = [at["offset"] for one in found if one["group"] == GROUP for at in one["topics"]]
    return offsets[0] if offsets else None


def _grants(account: dict[str, Any], to: str) -> bool:
    return any(grant["to"] == to for grant in account["grants"])


async def _logs_in(child: BusChild, secret: str, *, user: str = "") -> bool:
    """Whether a token, or a user's password, is accepted. Raises PolybusError."""
    try:
        await _ask(child, "GET", "/v1/topics", token=secret, user=user)
    except PolybusError as error:
        if not error.code.startswith("auth."):
            raise
        return False
    return True


async def _ask(
    child: BusChild,
    method: str,
    path: str,
    body: bytes | Any = None,
    *,
    token: str = "",
    user: str = "",
) -> Any:
    async with child.connected(Credentials(user, token) if token else None) as connection:
        return await ask_on(connection, method, path, body)


async def served_blobs(
    child: BusChild, blob_ids: Collection[str], *, token: str = ""
) -> dict[str, str]:
    """The state of large payloads on a bus: RIGHT, WRONG, or why one is not served."""
    found = {}
    async with child.connected(Credentials("", token) if token else None) as connection:
        for blob_id in blob_ids:
            try:
                content = await ask_on(connection, "GET", f"/v1/blobs/{blob_id}")
            except PolybusError as error:
                found[blob_id] = error.code
            else:
                is_right = hashlib.sha256(content).hexdigest() == blob_id
                found[blob_id] = RIGHT if is_right else WRONG
    return found


async def _served_account(child: BusChild, known: KnownAccount) -> str:
    try:
        path = f"/v1/topics/{OWN}/messages?offset=0"
        messages = (await _ask(child, "GET", path, token=known.token))["messages"]
        blobs = await served_blobs(child, [known.blob_id], token=known.token)
    except PolybusError as error:
        return shown(error)
    texts = [one.get("text") for one in messages]
    if texts[:1] not in ([], [known.value]):
        return WRONG
    if not texts:
        return "its message is missing"
    return blobs[known.blob_id]


def table_rows(table: Path) -> list[tuple[int, str]]:
    """Offsets and values of a topic's table, in order. Raises OSError, StorageError."""
    found: list[tuple[int, str]] = []
    for path in sorted(exposed.read_table(table).paths):
        rows = pq.read_table(table / path, columns=["offset", "value"], partitioning=None)
        texts = [value.decode() for value in rows["value"].to_pylist()]
        found += zip(rows["offset"].to_pylist(), texts, strict=True)
    return sorted(found)
