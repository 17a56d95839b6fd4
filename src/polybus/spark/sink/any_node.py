"""The commit of staged files; with several nodes, at any that has all files of the batch.

Each task stages at two nodes, so one of them may die at any moment. If a node dies during the
commit, the next one is asked: it ends the transaction of the other, and either finds that the batch
is committed or commits it. So it is done once, by any node.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polybus.errors import BusyError, PolybusError
from polybus.spark.location import BusLocation, Retry
from polybus.spark.nodes import MOVES
from polybus.spark.sink.staging import PATIENCE_S, StagedFile

COMMIT_TIMEOUT_S = 900.0
NODE_TIMEOUT_S = 300.0
"""The timeout for a machine that is down; then another node is asked."""
RETRIED = (*MOVES, "commit.fenced")


def files_in(messages: Sequence[Any]) -> list[StagedFile]:
    """The files that tasks have staged; Spark gives None for a failed task."""
    return [one for one in messages if one is not None and one.name is not None]


def commit_files(
    location: BusLocation,
    body: dict[str, Any],
    staged: Sequence[StagedFile],
    *,
    patience_s: float,
    timeout_s: float = COMMIT_TIMEOUT_S,
) -> None:
    """Ask for a commit. Raises as `commit_at_one`."""
    if not location.others:
        path = "/v1/commits"
        location.call("POST", path, body, patience_s=patience_s, timeout_s=timeout_s)
        return
    done_by = commit_at_one(location, body, staged)
    unstage(location, [replace(one, nodes=tuple({*one.nodes} - {done_by})) for one in staged])


def commit_at_one(location: BusLocation, body: dict[str, Any], staged: Sequence[StagedFile]) -> str:
    """Commit a batch; return the address of the node that did it.

    Raises:
        UsageError, StorageError: the bus refuses; nothing is published.
        PolybusError: `sink.staging-lost` if no node has all files of the batch; or all nodes that
        have them are unavailable, and the batch may or may not be published.
    """
    retry = Retry(PATIENCE_S, others=location.others)
    while True:
        last: PolybusError | None = None
        for node in location.each_node():
            url, _ = node.address()
            if any(url not in one.nodes for one in staged):
                continue
            try:
                with location.leaving(url):
                    node.call("POST", "/v1/commits", body, timeout_s=NODE_TIMEOUT_S)
                return url
            except PolybusError as error:
                if error.code not in RETRIED and not isinstance(error, BusyError):
                    raise
                last = error
        if last is None:
            text = "no node has all rows of the batch: two or more died while it was written"
            raise PolybusError("sink.staging-lost", f"{text}; start the query again")
        if last.code == "commit.fenced":
            # Another node still had the transaction, which has ended now.
            last = BusyError(last.code, last.text, retry_after_s=0.0)
        retry.wait(last)


def unstage(location: BusLocation, messages: Sequence[Any]) -> None:
    """Ask the bus to remove staged files; it does not if they are committed.

    While the bus is unavailable the files stay; it removes them later.
    """
    gone = set()
    for one in files_in(messages):
        copies = [replace(location, url=url) for url in one.nodes]
        for node in copies if location.others else [location]:
            try:
                if node.url not in gone:
                    node.call("DELETE", f"/v1/staging/{one.producer}/{one.name}")
            except PolybusError as error:
                if error.code in MOVES:
                    gone.add(node.url)
