"""An account is there as a whole or not at all, whenever the power fails or a kill comes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, crashes
from opened_kit import all_messages, on_node

from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.memory import MemoryLog
from polybus.services.accounts.records import Account
from polybus.services.accounts.store import AccountStore
from polybus.testing import ManualClock
from polybus.testing.faulty_disk import FaultyDisk

Change = Callable[[AccountStore], object]

CHANGES: dict[str, Change] = {
    "create": lambda store: store.create("new", "hash", []),
    "delete": lambda store: store.delete("old"),
    "password": lambda store: store.set_password("old", "other"),
    "grant": lambda store: store.grant("old", "other", "news", ["subscribe"]),
    "grant of default": lambda store: store.grant("default", "old", "news", ["publish"]),
    "token": lambda store: store.make_token("old"),
    "token revoked": lambda store: store.revoke_token("old", store.accounts["old"].tokens[0].id),
}
STEPS_MAX = 60


def prepare(data: Path) -> None:
    # Makes the folders, as the start of a bus does.
    MemoryLog(clock=ManualClock(), bytes_max=1 << 20, data=data).close()
    store = AccountStore(data)
    store.create("old", "hash", [])
    store.create("other", None, [])
    store.grant("other", "old", "*", ["subscribe"])
    store.make_token("old")


def accounts_of(data: Path) -> dict[str, Account]:
    """The accounts after the next start, none of them damaged."""
    MemoryLog(clock=ManualClock(), bytes_max=1 << 20, data=data).close()
    store = AccountStore(data)
    assert not store.damaged
    assert {path.name for path in (data / "accounts").iterdir()} >= store.accounts.keys()
    assert not list((data / "trash").glob("*"))
    return store.accounts


def comparable(accounts: dict[str, Account]) -> dict[str, tuple[object, ...]]:
    """Without what differs from run to run."""
    return {name: (one.password, len(one.tokens), one.grants) for name, one in accounts.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_whole_or_not_made_when_the_power_fails_at_any_step(
    change: str, tmp_path: Path
) -> None:
    base, data = tmp_path / "base", tmp_path / "data"
    prepare(base)
    before = comparable(accounts_of(base))
    shutil.copytree(base, data)
    CHANGES[change](AccountStore(data))
    after = comparable(accounts_of(data))
    assert after != before
    # Deleting an account takes the grants to it first.
    between = {name: (*one[:2], ()) for name, one in before.items()}
    seen = []
    for step in range(STEPS_MAX):
        shutil.rmtree(data)
        shutil.copytree(base, data)
        disk = FaultyDisk(seed=step)
        store = AccountStore(data, disk=disk)
        disk.cut_power_after(step)
        is_done = False
        with contextlib.suppress(StorageError):
            CHANGES[change](store)
            is_done = True
        disk.crash()
        found = comparable(accounts_of(data))
        assert found in ([before, between, after] if change == "delete" else [before, after])
        if is_done:
            assert found == after
        seen.append(found == after)
        if is_done and step > 0 and all(seen[-3:]) and len(seen) > 10:
            break
    assert seen[0] is False and seen[-1] is True


def test_a_damaged_account_is_named_and_its_topics_stay(tmp_path: Path) -> None:
    prepare(tmp_path)
    path = tmp_path / "accounts" / "old" / "account.json"
    whole = path.read_bytes()
    for corrupted in (b"", whole[:-5], whole.replace(b"hash", b"hasj"), b"{}"):
        path.write_bytes(corrupted)
        store = AccountStore(tmp_path)
        assert set(store.damaged) == {"old"}
        # Its topics stay its own.
        assert store.accounts["old"].password is None
        assert "other" in store.accounts
    path.unlink()
    assert set(AccountStore(tmp_path).damaged) == {"old"}


# An account with topics, which others grant rights to and name in their config files.

SHOP = {"shop/x": ["1", "2"], "shop/y": ["3"]}
OTHERS = {"a": ["4"], "other/z": ["5"]}
RIGHTS = {"other": ["z"], "third": ["z"]}


def with_accounts(run: Run) -> None:
    async def work(node: Node) -> None:
        for name in ("shop", "other", "third"):
            await node.accounts.create(name)
        for topic, values in {**SHOP, **OTHERS}.items():
            node.bus.create_topic(topic)
            node.bus.commit([Batch.of(topic, [value.encode() for value in values])], urgent=True)
        await node.context.durability.wait()
        node.accounts.grant("other", "shop", "z", ["subscribe"])
        node.accounts.grant("shop", "other", "x", ["publish"])

    on_node(work, run.data)
    config = run.data / "accounts" / "third" / "config.toml"
    permission = 'account = "shop"\ntopics = "z"\nrights = ["subscribe"]'
    config.write_text(f"[[permissions]]\n{permission}\n")


def delete_shop(run: Run) -> None:
    async def work(node: Node) -> None:
        run.resume()
        if "shop" in node.accounts.store.accounts:
            await node.accounts.remove("shop")
        run.acknowledge("deleted")

    run.pause()
    on_node(work, run.data)


def look_at_accounts(data: Path) -> Any:
    """The accounts, their messages, and the rights to topics of others that `shop` would have."""

    async def shown(node: Node) -> Any:
        owners = node.accounts.configs.granted.get("shop", {})
        rights = {owner: [one.topics for one in grants] for owner, grants in owners.items()}
        messages = all_messages(node.bus.log)
        own = {topic: values for topic, values in messages.items() if "$" not in topic}
        return [sorted(node.accounts.store.accounts), own, rights]

    return on_node(shown, data)


def check_deleted(crash: Crash) -> None:
    accounts, messages, rights = crash.seen
    left = {topic: values for topic, values in messages.items() if topic.startswith("shop/")}
    assert left.items() <= SHOP.items(), crash
    assert messages == OTHERS | left, crash
    assert all(RIGHTS[owner] == topics for owner, topics in rights.items()), crash
    assert set(accounts) - {"shop"} == {"default", "other", "third"}, crash
    if crash.acknowledged:
        assert "shop" not in accounts, crash
    if len(left) < len(SHOP):
        # Its config file cannot be changed, so it was severed first.
        assert "third" not in rights, crash
    if "shop" not in accounts:
        assert not left and not rights, crash
    assert crash.end == [["default", "other", "third"], OTHERS, {}], crash


@pytest.mark.slow
def test_no_topic_and_no_right_outlives_an_account_wherever_its_deletion_ends() -> None:
    seen = set()
    for crash in crashes(delete_shop, look_at_accounts, start=with_accounts):
        check_deleted(crash)
        seen.add(("shop" in crash.seen[0], len(crash.seen[1]), len(crash.seen[2])))
    # Whole, severed, without topics one by one, without grants, gone.
    assert seen >= {(True, 4, 2), (True, 4, 1), (True, 3, 1), (True, 2, 1), (True, 2, 0)}
    assert (False, 2, 0) in seen
