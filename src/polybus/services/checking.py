"""Checks all that a stopped bus has stored: the log, and state.db beside it."""

from pathlib import Path

from polybus.log import verify as log
from polybus.services.state_rows import NAME, verify_state


def verify(
    data: Path, *, fsync: bool = True, progress: log.VerifyProgress | None = None
) -> log.VerifyReport:
    """What `polybus verify` reports. `fsync`: every save was synced.

    Raises as log.verify.verify; StorageError `log.format`.
    """
    report = log.verify(data, progress=progress)
    for one in verify_state(data, fsync=fsync):
        report.add(log.Damage(file=NAME, reason=str(one)))
    return report
