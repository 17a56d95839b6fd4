"""An account is there as a whole or not at all, whenever the power fails."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
}
STEPS_MAX = 60


def prepare(data: Path) -> None:
    # Makes the folders, as the start of a bus does.
    MemoryLog(clock=ManualClock(), bytes_max=1 << 20, data=data).close()
    store = AccountStore(data)
    store.create("old", "hash", [])
    store.create("other", None, [])
    store.grant("other", "old", "*", ["subscribe"])


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
    for harmed in (b"", whole[:-5], whole.replace(b"hash", b"hasj"), b"{}"):
        path.write_bytes(harmed)
        store = AccountStore(tmp_path)
        assert set(store.damaged) == {"old"}
        # Its topics stay its own.
        assert store.accounts["old"].password is None
        assert "other" in store.accounts
    path.unlink()
    assert set(AccountStore(tmp_path).damaged) == {"old"}
