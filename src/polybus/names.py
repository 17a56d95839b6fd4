"""Names of topics and accounts: their canonical spelling, and a folder name for each topic."""

import difflib
import hashlib
import re
from collections.abc import Iterable
from urllib.parse import unquote

from polybus.errors import UsageError

TOPIC_BYTES_MAX = 255
ACCOUNT = "default"
# All clients may read them; only the bus and its administrator write. A closed list, because other
# names that begin with `$` are keywords of protocols (`$subscribe`, `$error`).
SYSTEM_TOPICS = ("$alerts", "$audit", "$commits", "$events", "$metrics", "$stats")
# Every account has its own of these: `$events` of the account `shop` is `shop/$events`.
ACCOUNT_SYSTEM_TOPICS = ("$alerts", "$events", "$stats")
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_PLAIN = re.compile(r"[a-z0-9._$-]+")
_FOLDER_BYTES_MAX = 200


def canonical(name: str, *, topic_bytes_max: int = TOPIC_BYTES_MAX) -> str:
    """The canonical spelling of a topic name: lower case, printable, within the limit.

    Raises UsageError `topic.invalid`.
    """
    folded = name.lower()
    if not folded or not folded.isprintable():
        raise UsageError("topic.invalid", "a topic name needs one or more printable characters")
    if len(folded.encode("utf-8", "surrogatepass")) > topic_bytes_max:
        raise UsageError("topic.invalid", f"the topic name is over {topic_bytes_max} bytes")
    return folded


def check_creatable(name: str) -> None:
    """Refuse names that are ambiguous in some protocol. Raises UsageError `topic.invalid`."""
    if name == "*" or name != name.strip() or "?receipt=" in name:
        text = f"'{name}' has a special meaning in some protocols; choose another name"
        raise UsageError("topic.invalid", text)


def is_reserved(name: str) -> bool:
    """Whether the name is reserved for system topics, which clients may read but not write."""
    return name.startswith("$") or name.partition("/")[2] in ACCOUNT_SYSTEM_TOPICS


def is_account(name: str) -> bool:
    """Whether an account other than the default one may have this name."""
    return name != ACCOUNT and _ACCOUNT.fullmatch(name) is not None


def full(account: str, name: str) -> str:
    """The name that the bus and its log have for an account's topic."""
    return name if account == ACCOUNT else f"{account}/{name}"


def within(account: str, topic: str) -> str:
    """The name that an account has for its own topic; the inverse of `full`."""
    return topic if account == ACCOUNT else topic[len(account) + 1 :]


def folder_of(name: str) -> str:
    """A folder name for the topic, valid on any file system and unique."""
    if _PLAIN.fullmatch(name) and name not in (".", "..") and len(name) <= _FOLDER_BYTES_MAX:
        return name
    escaped = "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in name
    )
    if escaped in (".", ".."):
        return escaped.replace(".", "%2E")
    if len(escaped) > _FOLDER_BYTES_MAX:
        # "%%" is in no escaped name, so a shortened name never equals a complete one.
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return f"{escaped[: _FOLDER_BYTES_MAX - 40]}%%{digest}"
    return escaped


def topic_in(folder: str) -> str:
    """The topic of a folder; the name of the folder if that was shortened."""
    name = unquote(folder)
    return name if folder_of(name) == folder else folder


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the known words nearest to an unknown one, else empty."""
    near = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.65)
    return f"; did you mean {' or '.join(near)}?" if near else ""
