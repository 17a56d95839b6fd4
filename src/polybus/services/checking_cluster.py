"""Checks everything that the nodes of a cluster have stored in Kafka.

The log checks how Kafka stores it; this module decodes messages of system topics and shared
entries.
"""

from collections.abc import Callable, Iterator

import msgspec

from polybus.batch import Batch
from polybus.log.cluster_location import ClusterLocation
from polybus.log.interface import SHARED
from polybus.log.opening import library_needed
from polybus.log.verify.verify import VerifyProgress, VerifyReport
from polybus.services import consumers
from polybus.services.accounts import cluster as accounts
from polybus.services.sessions import broadcasts, cluster
from polybus.services.transactions.commits import TOPIC, CommitRecord
from polybus.structs import decode

CHECKS: dict[str, Callable[[str, bytes], object]] = {
    accounts.KIND: accounts.read_entry,
    broadcasts.KIND: broadcasts.read_entry,
    consumers.KIND: consumers.read_entry,
    cluster.KIND: cluster.read_entry,
}
"""How a node decodes the name and value of an entry. Entries of other kinds are ignored."""
ERRORS = (msgspec.MsgspecError, ValueError, TypeError)


def verify_cluster(
    place: ClusterLocation, *, progress: VerifyProgress | None = None
) -> VerifyReport:
    """The report of `polybus verify` for a cluster. Raises as ClusterCheck does."""
    with library_needed(place):
        from polybus.log.kafka.verifying import ClusterCheck
    return ClusterCheck(place, _look, progress).run()


def _look(topic: str, batch: Batch) -> Iterator[tuple[int, str]]:
    """The messages of system topics that nodes cannot decode: their offsets, and why."""
    if topic == TOPIC:
        for offset, value in enumerate(batch.values(), batch.first_offset):
            try:
                decode(value, CommitRecord)
            except ERRORS as error:
                yield offset, f"it is not the record of a transaction: {error}"
    if topic == SHARED:
        found = zip(batch.keys or (), batch.values(), strict=False)
        for offset, (key, value) in enumerate(found, batch.first_offset):
            kind, _, name = (key or b"").decode(errors="replace").partition("/")
            try:
                if value and kind in CHECKS:
                    CHECKS[kind](name, bytes(value))
            except ERRORS as error:
                yield offset, f"the entry {kind} {name:.80} cannot be read: {error}"
