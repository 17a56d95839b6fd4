"""The stored record of an account: its password's hash, its tokens, and its grants.

An account owns the topics below its name. A grant lets another account use some of them; a token
logs in as its account, limited to some topics and rights, until it expires.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from polybus import names
from polybus.errors import UsageError

Right = Literal["publish", "subscribe", "administer"]
RIGHTS: tuple[Right, ...] = get_args(Right)
PATTERN_CHARACTERS_MAX = 255


class Grant(msgspec.Struct, frozen=True):
    """The account `to` has these rights to the owner's topics that the pattern matches."""

    to: str
    topics: str
    rights: tuple[Right, ...]


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token, without its secret. Empty `topics` or `rights` mean those of the account.

    Attributes:
        digest: SHA-256 of the secret. A secret has 256 random bits, so a slow hash adds nothing.
        topics: patterns of names, as the account calls the topics.
        expires: seconds since 1970.
    """

    id: str
    digest: str
    created: str
    topics: tuple[str, ...] = ()
    rights: tuple[Right, ...] = ()
    expires: float | None = None


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The content of account.json."""

    name: str
    created: str
    password: str | None = None
    """A hash by argon2id; None allows tokens only."""
    tokens: tuple[Token, ...] = ()
    grants: tuple[Grant, ...] = ()
    severed: tuple[str, ...] = ()
    """Deleted accounts that its config file still names: a later account of the same name does not
    get these permissions.
    """


def view(account: Account) -> dict[str, Any]:
    """An account without its secrets."""
    found: dict[str, Any] = msgspec.to_builtins(account)
    found["password"] = account.password is not None
    found["tokens"] = [
        {
            "id": one.id,
            "created": one.created,
            "topics": one.topics,
            "rights": one.rights,
            "expires": one.expires,
        }
        for one in account.tokens
    ]
    return found


def account_name(text: str) -> str:
    """The canonical name of an account. Raises UsageError `account.invalid`."""
    name = text.lower()
    if not names.is_account(name):
        why = "is not a valid name of an account: use 1 to 63 letters (a-z), digits, - and _"
        raise UsageError("account.invalid", f"{text[:40]!r} {why}, but not 'default'")
    return name


def rights_of(texts: Iterable[str]) -> tuple[Right, ...]:
    """Rights in canonical order, without repeats. Raises UsageError `account.invalid`."""
    given = set(texts)
    if unknown := given - set(RIGHTS):
        what = ", ".join(sorted(unknown))[:80]
        raise UsageError("account.invalid", f"unknown right {what}; use {', '.join(RIGHTS)}")
    return tuple(right for right in RIGHTS if right in given)


def check_pattern(text: str) -> None:
    """Raises UsageError `account.invalid`."""
    if not text or len(text) > PATTERN_CHARACTERS_MAX or not text.isprintable():
        why = f"is not a pattern like shop.*, of at most {PATTERN_CHARACTERS_MAX} characters"
        raise UsageError("account.invalid", f"{text[:40]!r} {why}")


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a pattern matches: `*` stands for any characters, also none."""
    return any(_matches(one.lower(), name) for one in patterns)


def _matches(pattern: str, name: str) -> bool:
    # Not a regular expression: those backtrack exponentially where `*` is repeated.
    first, *others = pattern.split("*")
    if not others:
        return name == first
    *middle, last = others
    at = len(first)
    if not name.startswith(first):
        return False
    for part in middle:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(last) and name.endswith(last)
