"""DATA/accounts/<account>/config.toml or config.json: what an operator sets for one account.

The bus reads the file again when it changes. A file that cannot be used changes nothing: the
settings before it stay, and the health of the bus says what is wrong.
"""

from pathlib import Path

import msgspec

from polybus import config_file, names
from polybus.config import DeclaredTopic, Limits, Retention, Settings
from polybus.errors import ConfigError, UsageError
from polybus.log.layout import account_folder
from polybus.log.topics import storage_error
from polybus.services.accounts.records import Grant, Right, account_name, check_pattern, rights_of
from polybus.structs import convert

FILES = ("config.toml", "config.json")
FileState = tuple[str, int, int] | None
"""Name, time and size of the file; None if it does not exist."""
UNREAD: FileState = ("", 0, 0)


class AccountLimits(Settings, frozen=True):
    """The limits of one account, in place of the `account-…` limits of the bus."""

    connections_max: int | None = None
    sessions_max: int | None = None
    topics_max: int | None = None
    bytes_max: int | None = None
    messages_per_s_max: int | None = None
    bytes_per_s_max: int | None = None
    consumers_max: int | None = None
    producers_max: int | None = None
    staging_bytes_max: int | None = None
    uploads_max: int | None = None

    def over(self, limits: Limits) -> "AccountLimits":
        """These limits, with those of the bus where none is set."""
        fields = [field.name for field in msgspec.structs.fields(self)]
        own = {name: getattr(self, name) for name in fields}
        return AccountLimits(
            **{
                name: getattr(limits, f"account_{name}") if value is None else value
                for name, value in own.items()
            }
        )


class Permission(Settings, frozen=True):
    """Rights of another account, as those of `polybus accounts grant`."""

    account: str
    topics: str
    rights: list[Right]


class AccountConfig(Settings, frozen=True):
    """The content of the file."""

    topics: list[str | DeclaredTopic] = []
    retention: Retention = Retention()
    limits: AccountLimits = AccountLimits()
    permissions: list[Permission] = []

    def grants(self) -> tuple[Grant, ...]:
        return tuple(
            Grant(one.account.lower(), one.topics.lower(), rights_of(one.rights))
            for one in self.permissions
        )

    def topic_list(self) -> list[DeclaredTopic]:
        """The declared topics, under the account's own names, with its retention."""
        found = []
        for entry in self.topics:
            topic = DeclaredTopic(name=entry) if isinstance(entry, str) else entry
            name = own_name(topic.name)
            retention = topic.retention if topic.retention != Retention() else self.retention
            found.append(msgspec.structs.replace(topic, name=name, retention=retention))
        return found


def own_name(text: str) -> str:
    """The canonical name of a topic of a named account. Raises UsageError `topic.invalid`."""
    name = names.canonical(text)
    names.check_creatable(name)
    if "/" in name or names.is_reserved(name):
        raise UsageError("topic.invalid", f"{name!r} must not contain / or begin with $")
    return name


def state_of(data: Path, account: str) -> FileState:
    """Raises StorageError if it is unknown whether the file exists."""
    for name in FILES:
        path = account_folder(data, account) / name
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise storage_error(error, f"cannot read {path}") from error
        return name, status.st_mtime_ns, status.st_size
    return None


def load(data: Path, account: str, name: str) -> AccountConfig:
    """Read and check a file. Raises ConfigError, which names the key."""
    path = account_folder(data, account) / name
    raw = config_file.read_file(path, f"account {account}")
    try:
        found = convert(raw, AccountConfig)
        found.topic_list()
        for permission in found.permissions:
            if permission.account != names.ACCOUNT:
                account_name(permission.account)
            check_pattern(permission.topics)
    except (msgspec.ValidationError, UsageError) as error:
        raise ConfigError("config.invalid", f"{path}: {error}") from error
    config_file.check_numbers(found.limits, f"{path}: limits")
    config_file.check_numbers(found.retention, f"{path}: retention")
    for topic in found.topic_list():
        config_file.check_schema(topic, f"{path}: topics: {topic.name}")
        config_file.check_numbers(topic.retention, f"{path}: topics: {topic.name}: retention")
    return found
