"""What the tests of accounts over HTTP share: a bus with two accounts, and clients of each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from http_kit import TIMEOUT_S, Http

from polybus.edges.node import Node
from polybus.log.layout import admin_token_path
from polybus.testing import run_bus

PASSWORDS = {"default": "one", "shop": "two", "other": "three"}


class Bus:
    """A bus with the topics `news`, `shop/news` and `shop/shared`, which `other` may read."""

    def __init__(self, node: Node, stack: contextlib.AsyncExitStack) -> None:
        self.node = node
        self._stack = stack

    async def client(self, **how: Any) -> Http:
        base = f"http://127.0.0.1:{self.node.tcp_port}"
        made = httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S, **how)
        return Http(self.node, await self._stack.enter_async_context(made))

    async def of(self, account: str) -> Http:
        return await self.client(auth=(account, PASSWORDS[account]))

    async def admin(self) -> Http:
        token = admin_token_path(self.node.data).read_text().strip()
        return await self.by_token(token)

    async def by_token(self, token: str) -> Http:
        return await self.client(headers={"authorization": f"Bearer {token}"})


@contextlib.asynccontextmanager
async def accounts_bus(data: str | None = None, **settings: Any) -> AsyncIterator[Bus]:
    """Nobody is the default account without a login. What a folder has of the rest stays."""
    settings.setdefault("accounts", {"default": "off"})
    async with run_bus("news", data=data, **settings) as node, contextlib.AsyncExitStack() as stack:
        accounts = node.accounts
        if accounts.store.accounts["default"].password is None:
            await accounts.set_password("default", PASSWORDS["default"])
        is_new = "shop" not in accounts.store.accounts
        for name in ("shop", "other"):
            if name not in accounts.store.accounts:
                await accounts.create(name, PASSWORDS[name])
        if is_new:
            for topic in ("shop/news", "shop/shared"):
                node.bus.create_topic(topic)
            accounts.grant("shop", "other", "shared", ["subscribe"])
        yield Bus(node, stack)
