"""DATA/accounts/<account>/account.json: the accounts of a data folder.

An account exists if its folder does: the log finds the owner of `shop/news` by it. Order
of writes, each durable before the next:

create   account.json in the folder DATA/trash/new-account, rename of that folder to the account's.
         So an account's folder without account.json has lost it: no one can log in, but its topics
         stay.
delete   the record of each account whose config file names it (`severed`); the topics of the
         account, by the log; the records with grants to it; rename of its folder into DATA/trash;
         its removal. So at no time could a later account of the same name inherit a right.

A cluster has another order (cluster.py).

The next start removes what a crash leaves in the trash. The default account needs no file; it has
one if it has a password, tokens or grants. Then an empty file `account.exists` beside it, durable
before the first such change is confirmed, shows that account.json was lost if it is missing.
"""

import contextlib
import datetime
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.log.layout import (
    account_folder,
    accounts_folder,
    folders_in,
    topics_folder,
    trash_folder,
)
from polybus.log.topics import storage_error
from polybus.services.accounts.records import (
    Account,
    Grant,
    Right,
    Token,
    account_name,
    check_pattern,
    rights_of,
)

logger = logging.getLogger("polybus.accounts")
NAME = "account.json"
EXISTS = "account.exists"
DAMAGED = "account.damaged"
TOKEN_PREFIX = "pbt"
SECRET_BYTES = 32
_NEW = "new-account"
_NOBODY = Account(name="", created="")
ACCOUNTS_MAX = 10_000
"""Each takes memory, and its file is checked regularly; sign-ups may create many."""
TOKENS_MAX = 1000
GRANTS_MAX = 1000
Changed = Callable[[Account | None, Account | None], None]


class AccountStore:
    """All accounts of a data folder except the default one, which needs no record.

    One process at a time may change it: the bus, or a command that holds the folder's lock.
    """

    def __init__(self, data: Path, *, disk: Disk | None = None) -> None:
        """Read the accounts; one whose file is damaged is empty, and named in `damaged`."""
        self.data = data
        self._disk = disk or Disk()
        self.accounts = {names.ACCOUNT: Account(name=names.ACCOUNT, created="")}
        self.damaged: dict[str, str] = {}
        self.closing: set[str] = set()
        """Accounts whose deletion has begun, perhaps at another node, including damaged ones."""
        self._by_token: dict[str, str] = {}
        self.changed: Changed = lambda before, after: None
        """Called after every saved change with the account before and after it, None if missing."""
        self._load_all()

    def _load_all(self) -> None:
        for name, found in _stored(self.data):
            if isinstance(found, Account):
                self._keep(found)
                continue
            logger.error("%s: no one can log in to %r: %s", DAMAGED, name, found)
            self.damaged[name] = found
            # It still owns its topics, so that no other account may read them.
            self.accounts[name] = Account(name=name, created="")

    def _keep(self, account: Account) -> None:
        before = self.accounts.get(account.name)
        for token in before.tokens if before is not None else ():
            self._by_token.pop(token.id, None)
        self._by_token |= {token.id: account.name for token in account.tokens}
        self.accounts[account.name] = account
        self.changed(before, account)

    def _drop(self, name: str) -> None:
        before = self.accounts.pop(name, _NOBODY)
        for token in before.tokens:
            self._by_token.pop(token.id, None)
        self.damaged.pop(name, None)
        self.changed(before, None)

    def get(self, name: str) -> Account:
        """Raises UsageError `account.unknown`."""
        account = self.accounts.get(name)
        if account is None:
            raise UsageError("account.unknown", f"there is no account {name[:40]!r}")
        return account

    def create(self, name: str, password: str | None, used: Iterable[str]) -> Account:
        """Create an account; `password` is a hash, `used` the names of all topics and consumers.

        Raises:
            UsageError: `account.invalid`, `account.exists`, `account.too-many`, or `account.taken`
            if the default account has topics or consumers that would look like those of this one.
            StorageError: it cannot be written.
        """
        name = account_name(name)
        if name in self.accounts or name in self.damaged:
            raise UsageError("account.exists", f"account {name!r} already exists")
        if len(self.accounts) + len(self.damaged) >= ACCOUNTS_MAX:
            text = f"the bus is at its limit of {ACCOUNTS_MAX} accounts; delete some first"
            raise UsageError("account.too-many", text)
        taken = next((one for one in used if one.startswith(f"{name}/")), None)
        if taken is not None:
            text = f"the default account has a topic or consumer {taken!r}; choose another name"
            raise UsageError("account.taken", text)
        account = Account(name=name, created=_now(), password=password)
        self._make(account)
        return account

    def _make(self, account: Account) -> None:
        name = account.name
        new, folder = trash_folder(self.data) / _NEW, account_folder(self.data, name)
        try:
            self._disk.remove_folder(new)
            self._disk.make_folder(new)
            self._write(new, account)
            self._disk.make_folder(folder.parent)
            self._disk.rename(new, folder)
            for changed in (new.parent, folder.parent):
                self._disk.sync_folder(changed)
        except OSError as error:
            raise storage_error(error, f"cannot create account {name!r}") from error
        self._keep(account)

    def delete(self, name: str, deletion: int = 0) -> None:
        """Remove an account without topics, and the grants to it.

        `deletion` is the result of `begin_delete`.

        Raises:
            UsageError: `account.unknown`, `account.invalid`, `account.in-use`.
            StorageError: it cannot be written.
        """
        if account_name(name) not in self.damaged:
            self.get(name)
        if folders_in(topics_folder(self.data, name)):
            raise UsageError("account.in-use", f"account {name!r} has topics; delete them first")
        self.check_deleting(name, deletion)
        self._end_grants(name)
        self._remove(name, deletion)

    async def catch_up(self) -> None:
        """Wait for everything that any node has written so far. Raises StorageError."""

    def begin_delete(self, name: str) -> int:
        """Keep all nodes from adding to an account that is being deleted; return the deletion's id.

        In files there is no other node. Raises StorageError.
        """
        return 0

    def check_deleting(self, name: str, deletion: int) -> None:
        """Raises UsageError `account.unknown` if another node has finished this deletion."""

    def _end_grants(self, name: str) -> None:
        """Remove all grants to an account. Raises StorageError."""

        def remove(account: Account) -> Account:
            others = tuple(grant for grant in account.grants if grant.to != name)
            return msgspec.structs.replace(account, grants=others)

        for owner in list(self.accounts.values()):
            if any(grant.to == name for grant in owner.grants):
                with contextlib.suppress(UsageError):
                    # Another node of a cluster may have deleted the owner.
                    self._change(owner.name, remove)

    def _remove(self, name: str, deletion: int) -> None:
        folder, trashed = account_folder(self.data, name), trash_folder(self.data) / f"of-{name}"
        try:
            self._disk.remove_folder(trashed)
            self._disk.make_folder(trashed.parent)
            self._disk.rename(folder, trashed)
            for changed in (trashed.parent, folder.parent):
                self._disk.sync_folder(changed)
            self._disk.remove_folder(trashed)
        except OSError as error:
            raise storage_error(error, f"cannot delete account {name!r}") from error
        self._drop(name)

    def set_password(self, name: str, password: str | None) -> None:
        """Replace the password's hash; None allows only tokens. Raises as `get`; StorageError."""
        self._change(name, lambda account: msgspec.structs.replace(account, password=password))

    def grant(self, owner: str, to: str, topics: str, rights: Iterable[str]) -> Grant:
        """Grant topics to another account; replaces a grant of the same pattern.

        Raises:
            UsageError: `account.unknown`, `account.invalid`, `account.too-many`.
            StorageError: it cannot be written.
        """
        check_pattern(topics)
        self.get(to)
        if to == owner:
            text = f"{owner!r} owns these topics already; name another account"
            raise UsageError("account.invalid", text)
        grant = Grant(to, topics.lower(), rights_of(rights))

        def add(account: Account) -> Account:
            self._check_open(to)
            others = _without(account.grants, to, grant.topics)
            if len(others) >= GRANTS_MAX:
                text = f"{owner!r} is at its limit of {GRANTS_MAX} grants; revoke some first"
                raise UsageError("account.too-many", text)
            return msgspec.structs.replace(account, grants=(*others, grant))

        self._change(owner, add)
        return grant

    def _check_open(self, name: str) -> None:
        """Raises UsageError `account.unknown`; `account.damaged` if it is being deleted."""
        self.get(name)
        if name in self.closing:
            raise UsageError("account.damaged", f"account {name!r}: {self.damaged[name]}")

    def revoke(self, owner: str, to: str, topics: str) -> None:
        """Remove a grant. Raises UsageError `account.unknown`, `account.no-grant`; StorageError."""
        topics = topics.lower()

        def remove(account: Account) -> Account:
            others = _without(account.grants, to, topics)
            if len(others) == len(account.grants):
                text = f"{owner}/{topics} is not granted to {to!r}"
                raise UsageError("account.no-grant", text)
            return msgspec.structs.replace(account, grants=others)

        self._change(owner, remove)

    def sever(self, owner: str, name: str) -> None:
        """Record that the owner's config file names a deleted account. Raises StorageError."""

        def add(account: Account) -> Account:
            severed = dict.fromkeys((*account.severed, name))
            return msgspec.structs.replace(account, severed=tuple(severed))

        if owner not in self.damaged:
            self._change(owner, add)

    def keep_severed(self, owner: str, named: Collection[str]) -> None:
        """Keep records of severed accounts only for these names. Raises StorageError."""

        def keep(account: Account) -> Account:
            severed = tuple(one for one in account.severed if one in named)
            return msgspec.structs.replace(account, severed=severed)

        if owner not in self.damaged:
            self._change(owner, keep)

    def make_token(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        rights: Iterable[str] = (),
        expires: float | None = None,
    ) -> str:
        """Add a token and return its secret, which is not stored. Removes expired tokens.

        Raises:
            UsageError: `account.unknown`, `account.invalid`, `account.too-many`.
            StorageError: it cannot be written.
        """
        patterns = tuple(topic.lower() for topic in topics)
        for one in patterns:
            check_pattern(one)
        allowed: tuple[Right, ...] = rights_of(rights)
        identity, secret = secrets.token_hex(6), secrets.token_urlsafe(SECRET_BYTES)
        token = Token(identity, _digest(secret), _now(), patterns, allowed, expires)

        def add(account: Account) -> Account:
            # The console creates one for each login, which would fill up the account.
            valid = [one for one in account.tokens if (one.expires or math.inf) > time.time()]
            if len(valid) >= TOKENS_MAX:
                text = f"{name!r} is at its limit of {TOKENS_MAX} tokens; revoke some first"
                raise UsageError("account.too-many", text)
            return msgspec.structs.replace(account, tokens=(*valid, token))

        self._change(name, add)
        return f"{TOKEN_PREFIX}_{identity}_{secret}"

    def revoke_token(self, name: str, identity: str) -> None:
        """Remove a token. Raises UsageError `account.unknown`, `account.no-token`; StorageError."""

        def remove(account: Account) -> Account:
            others = tuple(token for token in account.tokens if token.id != identity)
            if len(others) == len(account.tokens):
                raise UsageError("account.no-token", f"{name!r} has no token {identity[:40]!r}")
            return msgspec.structs.replace(account, tokens=others)

        self._change(name, remove)

    def find_token(self, text: str) -> tuple[str, Token] | None:
        """The account and token of a secret, whether or not it has expired."""
        prefix, _, rest = text.partition("_")
        identity, _, secret = rest.partition("_")
        if prefix != TOKEN_PREFIX:
            return None
        account = self.accounts.get(self._by_token.get(identity, ""), _NOBODY)
        for token in account.tokens:
            if token.id == identity and hmac.compare_digest(token.digest, _digest(secret)):
                return account.name, token
        return None

    def _change(self, name: str, change: Callable[[Account], Account]) -> None:
        if name in self.damaged:
            text = f"account {name!r}: {self.damaged[name]}; restore the file first"
            raise UsageError("account.damaged", text)
        before = self.get(name)
        after = change(before)
        if after != before:
            self._save(after)

    def _save(self, account: Account) -> None:
        folder = account_folder(self.data, account.name)
        try:
            self._write(folder, account)
            if account.name == names.ACCOUNT and not (folder / EXISTS).exists():
                replace_file(folder / EXISTS, b"", self._disk, mode=0o600)
        except OSError as error:
            raise storage_error(error, f"cannot write {folder / NAME}") from error
        self._keep(account)

    def _write(self, folder: Path, account: Account) -> None:
        replace_file(folder / NAME, checked_json.encode(account), self._disk, mode=0o600)


def damaged_accounts(data: Path) -> dict[Path, str]:
    """The files of accounts that are damaged or missing, each with the reason."""
    return {
        account_folder(data, name) / NAME: found
        for name, found in _stored(data)
        if not isinstance(found, Account)
    }


def _stored(data: Path) -> Iterator[tuple[str, Account | str]]:
    """Every account of a data folder, or the problem with its file."""
    for folder in folders_in(accounts_folder(data)):
        path = folder / NAME
        may_be_missing = not names.is_account(folder.name) and not (folder / EXISTS).exists()
        if may_be_missing and not path.exists():
            continue
        try:
            account = checked_json.decode(path.read_bytes(), Account, path)
            if account.name != folder.name:
                raise StorageError("log.damaged", f"{path}: it names account {account.name!r}")
        except StorageError as error:
            yield folder.name, error.text
        except FileNotFoundError:
            yield folder.name, f"{path}: is missing"
        except OSError as error:
            yield folder.name, f"{path}: {error.strerror}"
        else:
            yield folder.name, account


def _without(grants: tuple[Grant, ...], to: str, topics: str) -> tuple[Grant, ...]:
    return tuple(one for one in grants if (one.to, one.topics) != (to, topics))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
