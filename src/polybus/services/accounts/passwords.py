"""Checks passwords, off the loop and as rarely as possible.

A password's hash is made to be slow (argon2id). After the first success the bus remembers a keyed
digest of the password: it then recognises both the correct password and every wrong one at once, so
that a flood of logins does not cost a hash each. The key is new at each start, and is never stored.
"""

import asyncio
import hashlib
import hmac
import secrets
from concurrent.futures import ThreadPoolExecutor

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from polybus.errors import UsageError

PASSWORD_BYTES_MAX = 1024
# 19 MiB and two passes, on one thread: the minimum that OWASP recommends, because a bus may check
# many passwords at a time.
_hasher = PasswordHasher(time_cost=2, memory_cost=19 << 10, parallelism=1)


def hash_of(password: str) -> str:
    """A hash to store. It takes some 20 ms. Raises UsageError `account.invalid`."""
    if not password or len(password.encode()) > PASSWORD_BYTES_MAX:
        text = f"a password must have 1 to {PASSWORD_BYTES_MAX} bytes"
        raise UsageError("account.invalid", text)
    return _hasher.hash(password)


class PasswordChecker:
    """Compares passwords with stored hashes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._key = secrets.token_bytes(32)
        # The digest of the correct password, by its stored hash.
        self._known: dict[str, bytes] = {}
        # One thread: a flood of logins takes at most one processor.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-passwords")

    def is_known(self, password: str, stored: str) -> bool:
        """Whether it is the correct password, and was verified before."""
        known = self._known.get(stored)
        return known is not None and hmac.compare_digest(known, self._digest(password))

    def _digest(self, password: str) -> bytes:
        return hashlib.blake2b(password.encode(errors="replace"), key=self._key).digest()

    async def is_right(self, password: str, stored: str) -> bool:
        digest = self._digest(password)
        known = self._known.get(stored)
        if known is None and await self._loop.run_in_executor(
            self._thread, _verify, stored, password
        ):
            known = self._known[stored] = digest
        return known is not None and hmac.compare_digest(known, digest)

    def forget(self, stored: str | None) -> None:
        """A password was changed, or its account deleted."""
        self._known.pop(stored or "", None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _verify(stored: str, password: str) -> bool:
    try:
        return _hasher.verify(stored, password)
    except (VerificationError, InvalidHashError, UnicodeEncodeError):
        return False
