"""DATA/accounts/<account>/account.json: the accounts of a data folder.

The folder of an account is what makes it one: the log finds the owner of `shop/news` by it. Order
of writes, each durable before the next:

create   account.json in the folder DATA/trash/new-account, rename of that folder to the account's.
         So an account's folder without account.json has lost it: nobody can log in, and its topics
         stay.
delete   the topics of the account, by the log; rename of its folder into DATA/trash; its removal.

The next start removes what a crash leaves in the trash. The default account needs no file; it has
one if it has a password, tokens or grants.
"""

import datetime
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
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
DAMAGED = "account.damaged"
TOKEN_PREFIX = "pbt"
SECRET_BYTES = 32
_NEW = "new-account"
_NOBODY = Account(name="", created="")
TOKENS_MAX = 1000
GRANTS_MAX = 1000


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
        self._by_token: dict[str, str] = {}
        for folder in folders_in(accounts_folder(data)):
            if names.is_account(folder.name) or (folder / NAME).exists():
                self._load(folder)

    def _load(self, folder: Path) -> None:
        path = folder / NAME
        try:
            account = checked_json.decode(path.read_bytes(), Account, path)
            if account.name != folder.name:
                raise StorageError("log.damaged", f"{path}: it names account {account.name!r}")
        except (StorageError, OSError) as error:
            reason = error.text if isinstance(error, StorageError) else f"{path}: {error.strerror}"
            logger.error("%s: nobody can log in to %r: %s", DAMAGED, folder.name, reason)
            self.damaged[folder.name] = reason
            # Its topics stay its own, so that nobody else may read them.
            self.accounts[folder.name] = Account(name=folder.name, created="")
        else:
            self._keep(account)

    def _keep(self, account: Account) -> None:
        before = self.accounts.get(account.name)
        for token in before.tokens if before is not None else ():
            self._by_token.pop(token.id, None)
        self._by_token |= {token.id: account.name for token in account.tokens}
        self.accounts[account.name] = account

    def get(self, name: str) -> Account:
        """Raises UsageError `account.unknown`."""
        account = self.accounts.get(name)
        if account is None:
            raise UsageError("account.unknown", f"there is no account {name[:40]!r}")
        return account

    def create(self, name: str, password: str | None, topics: Iterable[str]) -> Account:
        """Create an account; `password` is a hash, and `topics` are all that exist.

        Raises:
            UsageError: `account.invalid`, `account.exists`, or `account.taken` if the default
                account has topics that would look like this one's.
            StorageError: it cannot be written.
        """
        name = account_name(name)
        if name in self.accounts or name in self.damaged:
            raise UsageError("account.exists", f"there is an account {name!r}")
        taken = next((topic for topic in topics if topic.startswith(f"{name}/")), None)
        if taken is not None:
            text = f"the default account has the topic {taken!r}; choose another name"
            raise UsageError("account.taken", text)
        account = Account(name=name, created=_now(), password=password)
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
        return account

    def delete(self, name: str) -> None:
        """Remove an account without topics, and the grants to it.

        Raises:
            UsageError: `account.unknown`, `account.invalid`, `account.in-use`.
            StorageError: it cannot be written.
        """
        if account_name(name) not in self.damaged:
            self.get(name)
        if folders_in(topics_folder(self.data, name)):
            raise UsageError("account.in-use", f"account {name!r} has topics; delete them first")
        for owner in list(self.accounts.values()):
            others = tuple(grant for grant in owner.grants if grant.to != name)
            if len(others) < len(owner.grants):
                self._save(msgspec.structs.replace(owner, grants=others))
        folder, aside = account_folder(self.data, name), trash_folder(self.data) / f"of-{name}"
        try:
            self._disk.remove_folder(aside)
            self._disk.make_folder(aside.parent)
            self._disk.rename(folder, aside)
            for changed in (aside.parent, folder.parent):
                self._disk.sync_folder(changed)
            self._disk.remove_folder(aside)
        except OSError as error:
            raise storage_error(error, f"cannot delete account {name!r}") from error
        for token in self.accounts.pop(name, _NOBODY).tokens:
            self._by_token.pop(token.id, None)
        self.damaged.pop(name, None)

    def set_password(self, name: str, password: str | None) -> None:
        """Replace the password's hash; None allows tokens only. Raises as `get`; StorageError."""
        self._change(name, lambda account: msgspec.structs.replace(account, password=password))

    def grant(self, owner: str, to: str, topics: str, rights: Iterable[str]) -> Grant:
        """Let an account use topics of another; a grant of the same pattern is replaced.

        Raises:
            UsageError: `account.unknown`, `account.invalid`, `account.too-many`.
            StorageError: it cannot be written.
        """
        check_pattern(topics)
        self.get(to)
        if to == owner:
            raise UsageError("account.invalid", f"{owner!r} owns these topics")
        grant = Grant(to, topics.lower(), rights_of(rights))

        def add(account: Account) -> Account:
            others = _without(account.grants, to, grant.topics)
            if len(others) >= GRANTS_MAX:
                raise UsageError("account.too-many", f"{owner!r} has {GRANTS_MAX} grants")
            return msgspec.structs.replace(account, grants=(*others, grant))

        self._change(owner, add)
        return grant

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

    def make_token(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        rights: Iterable[str] = (),
        expires: float | None = None,
    ) -> str:
        """Add a token and return its text, which is stored nowhere.

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
            if len(account.tokens) >= TOKENS_MAX:
                raise UsageError("account.too-many", f"{name!r} has {TOKENS_MAX} tokens")
            return msgspec.structs.replace(account, tokens=(*account.tokens, token))

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
        """The account and token of a token's text, whether it has expired or not."""
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
        self._save(change(self.get(name)))

    def _save(self, account: Account) -> None:
        folder = account_folder(self.data, account.name)
        try:
            self._write(folder, account)
        except OSError as error:
            raise storage_error(error, f"cannot write {folder / NAME}") from error
        self._keep(account)

    def _write(self, folder: Path, account: Account) -> None:
        replace_file(folder / NAME, checked_json.encode(account), self._disk, mode=0o600)


def _without(grants: tuple[Grant, ...], to: str, topics: str) -> tuple[Grant, ...]:
    return tuple(one for one in grants if (one.to, one.topics) != (to, topics))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
