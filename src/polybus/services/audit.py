"""The audit log: every administrative change is one message of the system topic `$audit`.

Order of writes: the change, its message, then the answer, which waits until the message is
durable. A crash between the first two leaves a change without a message, but its caller got no
answer. A log that takes no writes does not undo the change either: the failure is logged, and the
answer is the error.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from polybus.batch import Batch
from polybus.errors import PolybusError
from polybus.services.context import Context
from polybus.services.events import iso_time

logger = logging.getLogger("polybus.audit")

AUDIT_TOPIC = "$audit"
PROTOCOL = "polybus"
TARGET_CHARACTERS_MAX = 500


class AuditLog:
    """Writes to `$audit`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def record(
        self, who: tuple[str, str], action: str, target: str, detail: Mapping[str, Any]
    ) -> None:
        """Record a change; it is durable when this returns. `who` is the account and its address.

        Raises StorageError.
        """
        ticket = self.append(who, action, target, detail)
        await self._context.durability.wait(ticket)

    def append(
        self, who: tuple[str, str], action: str, target: str, detail: Mapping[str, Any]
    ) -> int:
        """Record a change without waiting; return its ticket. Raises StorageError."""
        account, peer = who
        entry = {
            "time": iso_time(self._context.clock_us()),
            "account": account,
            "peer": peer,
            "action": action,
            "target": target[:TARGET_CHARACTERS_MAX],
            "detail": detail,
        }
        batch = Batch.of(AUDIT_TOPIC, [msgspec.json.encode(entry)])
        batch.protocol = PROTOCOL
        try:
            return self._context.bus.commit([batch], urgent=True)
        except PolybusError as error:
            logger.error("%s of %s by %s is not in $audit: %s", action, target, account, error)
            raise
