"""Sessions: inboxes that the bus keeps for msgstream clients, managed over the HTTP API."""

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from polybus.client.http.connection import Answer, HttpConnection, Request
from polybus.client.message import Start, start_text
from polybus.client.options import ClientOptions
from polybus.client.urls import Address
from polybus.errors import UsageError

Events = Iterable[Sequence[Any]]
"""`[("type", data), …]`; data is any JSON value and optional."""


class _Created(msgspec.Struct):
    session_key: str = msgspec.field(name="sessionKey")


class _Topics(msgspec.Struct):
    topics: list[str]


class _Broadcast(msgspec.Struct):
    sessions: int


class Sessions:
    """The sessions of a bus. A key gives full access to its session: treat it like a password.

    Every call raises PolybusError with the bus's code (`session.unknown`, `topic.unknown`, …), or
    `client.unreachable`, `client.disconnected`, `client.timeout`, `client.answer-invalid`.
    """

    def __init__(self, address: Address, options: ClientOptions) -> None:
        self._http = HttpConnection(address, options)
        self._timeout_s = options.connect_timeout_s

    async def create(
        self,
        topics: Iterable[str] = (),
        *,
        start: Start = "latest",
        ttl_s: float | None = None,
    ) -> str:
        """Create a session that follows the topics, and return its key.

        Args:
            start: where it starts in each topic, as for `Client.subscribe`.
            ttl_s: how long it lives without a client; by default as the bus is configured.
        """
        wanted: dict[str, Any] = {"topics": list(topics), "from": start_text(start)}
        if ttl_s is not None:
            wanted["ttl-s"] = ttl_s
        answer = await self._ask("POST", "/v1/sessions", wanted)
        return answer.json(_Created).session_key

    async def set_topics(self, key: str, topics: Iterable[str]) -> list[str]:
        """Follow exactly these topics; return their canonical names."""
        answer = await self._ask("PUT", f"{_path(key)}/topics", {"topics": list(topics)})
        return answer.json(_Topics).topics

    async def push(self, key: str, events: Events) -> None:
        """Add events to one session, as one pack; it is durable when this returns."""
        await self._ask("POST", f"{_path(key)}/packs", _pack(events))

    async def broadcast(self, events: Events) -> int:
        """Add events to every session, as one pack each; return the number of sessions."""
        answer = await self._ask("POST", "/v1/broadcast", _pack(events))
        return answer.json(_Broadcast).sessions

    async def delete(self, key: str) -> None:
        """Delete a session and notify its client."""
        await self._ask("DELETE", _path(key), None)

    def close(self) -> None:
        """Close the connection; the sessions stay."""
        self._http.close()

    async def _ask(self, method: str, target: str, body: Any) -> Answer:
        content = b"" if body is None else msgspec.json.encode(body)
        request = Request(method=method, target=target, body=content)
        answer = await self._http.request(request, timeout_s=self._timeout_s)
        answer.check()
        return answer


def _path(key: str) -> str:
    if not key:
        raise UsageError("session.unknown", "the session key is empty")
    return f"/v1/sessions/{quote(key, safe='')}"


def _pack(events: Events) -> list[list[Any]]:
    return [list(event) for event in events]
