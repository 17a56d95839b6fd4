"""Topic names: one spelling everywhere, and a safe folder for each."""

from __future__ import annotations

import hashlib
import re

from polybus.errors import UsageError

TOPIC_BYTES_MAX = 255
ACCOUNT = "default"
# Everybody may read them, only the bus and its administrator write. A closed list: other names
# that begin with `$` are words of protocols (`$subscribe`, `$error`), and more may come.
SYSTEM_TOPICS = ("$alerts", "$commits", "$events", "$stats")
_PLAIN = re.compile(r"[a-z0-9._$-]+")
_FOLDER_BYTES_MAX = 200


def canonical(name: str, *, topic_bytes_max: int = TOPIC_BYTES_MAX) -> str:
    """The one spelling of a topic's name: lower case, printable, within the limit.

    Raises:
        UsageError: `topic.invalid`; nothing that is not a possible name gets further than here.
    """
    folded = name.lower()
    if not folded or not folded.isprintable():
        raise UsageError("topic.invalid", "a topic name is one or more printable characters")
    if len(folded.encode("utf-8", "surrogatepass")) > topic_bytes_max:
        raise UsageError("topic.invalid", f"the topic name is over {topic_bytes_max} bytes")
    return folded


def check_creatable(name: str) -> None:
    """Refuse names that some protocol could not tell from its own words.

    Raises:
        UsageError: `topic.invalid`.
    """
    if name == "*" or name != name.strip() or "?receipt=" in name:
        text = f"'{name}' cannot be told from a protocol's own words on some connections"
        raise UsageError("topic.invalid", text)


def is_reserved(name: str) -> bool:
    """Whether the name is the system's own: clients may read such topics but never write them."""
    return name.startswith("$")


def folder_of(name: str) -> str:
    """A folder name for the topic that any file system can hold; different for different topics."""
    if _PLAIN.fullmatch(name) and name not in (".", "..") and len(name) <= _FOLDER_BYTES_MAX:
        return name
    escaped = "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in name
    )
    if escaped in (".", ".."):
        return escaped.replace(".", "%2E")
    if len(escaped) > _FOLDER_BYTES_MAX:
        # "%%" appears in no escaped name, so a shortened one never meets a whole one.
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        return f"{escaped[: _FOLDER_BYTES_MAX - 40]}%%{digest}"
    return escaped
