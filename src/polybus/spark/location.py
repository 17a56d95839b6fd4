"""Where the log of a reader, writer or pipeline is, and how to call the bus that owns it.

Source and sink use the files of a data folder if they can, and HTTP if a URL is given. A process
that can open the files can read everything. So with a token they use HTTP too, where the bus checks
its rights, unless it is the token of the folder's administrator.

If the messages of a bus are in Kafka, the source reads them there. It finds the cluster in the data
folder of a node, or by the options `log` and `cluster.…`, which are the settings of a node.

All HTTP calls of this package share one policy: while the bus is unavailable they are retried with
back-off, and refusals are raised at once. If `url` names several nodes of a bus, the next one is
asked at once (nodes.py).
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polybus.client.http.blocking import ANSWER_TIMEOUT_S, bus_url, read_token, request
from polybus.client.http.connection import JSON
from polybus.client.retry import Backoff
from polybus.config import KafkaLogin, KafkaTls
from polybus.config_file import brokers_of
from polybus.errors import BusyError, ConfigError, PolybusError, UsageError
from polybus.log.cluster_location import ClusterLocation, read_location, with_absolute_paths
from polybus.spark import nodes
from polybus.structs import convert

DATA_VARIABLE = "POLYBUS_DATA"
DEFAULT_FOLDER = "polybus-data"
_TLS = [f"tls.{name}" for name in KafkaTls.__struct_encode_fields__]
_LOGIN = [f"login.{name}" for name in KafkaLogin.__struct_encode_fields__]
CLUSTER_OPTIONS = tuple(f"cluster.{name}" for name in ("prefix", *_TLS, *_LOGIN))
"""Options for access to a Kafka cluster, with the names of a node's settings."""
OCTETS = "application/octet-stream"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BusLocation:
    """A data folder, and the URL of the bus if its log is not in that folder.

    `token` logs in to the bus; without it, the permissions are those of the folder's users.
    `cluster` is the Kafka cluster that has the messages, if any: resolved before tasks run that do
    not see the folder. With `is_cluster_only` no node was named.
    """

    data: Path = Path(DEFAULT_FOLDER)
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    cluster: ClusterLocation | None = None
    is_cluster_only: bool = False

    def __str__(self) -> str:
        return str(self.cluster) if self.is_cluster_only else self.url or str(self.data)

    def options(self) -> dict[str, str]:
        """The location as options of the source and the sink."""
        if self.is_cluster_only and self.cluster is not None:
            return cluster_options(self.cluster)
        where = {"data": str(self.data)} if self.url is None else {"url": self.url}
        return where | ({"token": self.token} if self.token else {})

    @property
    def is_local(self) -> bool:
        """Whether files in the data folder are used: those of the log, or at least staged ones."""
        return self.url is None and self.token is None

    @property
    def has_log_files(self) -> bool:
        """Whether the messages are in files of the data folder."""
        return self.is_local and self.cluster is None and read_location(self.data) is None

    @property
    def is_folder_here(self) -> bool:
        """Whether this machine has the folder of a bus, with its messages or without them."""
        has_note = (self.data / "polybus.json").exists()
        return has_note or read_location(self.data) is not None

    def missing_options(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The location as options, unless the given ones already have one."""
        named = {name.lower() for name in given} & {"data", "url", "log"}
        return {} if named else self.options()

    def address(self) -> tuple[str, str | None]:
        """The URL and the token to use now: a bus that restarts may listen on another port.

        Raises:
            UsageError: `client.unreachable` if no bus runs on the data folder;
            `spark.option-invalid` if only a cluster is named.
        """
        if self.is_cluster_only:
            text = "option log: only a node can do this; name one with option url or data instead"
            raise UsageError("spark.option-invalid", text)
        if self.url is not None:
            return nodes.in_order(self.url)[0], self.token
        return bus_url(self.data), self.token or read_token(self.data)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        patience_s: float = 0.0,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Send a request with bytes or JSON and return the JSON that the bus answers.

        A request may arrive twice: the bus must treat it as idempotent if `patience_s` is not 0.

        Raises:
            UsageError, BusyError, StorageError: the bus refused, with its own code and text.
            PolybusError: the bus is still unavailable after `patience_s`.
        """
        is_bytes = isinstance(body, bytes)
        content = body if is_bytes or body is None else json.dumps(body).encode()

        def send() -> Any:
            url, token = self.address()
            with self.leaving(url):
                answer = request(
                    url,
                    method,
                    path,
                    content,
                    token=token,
                    content_type=OCTETS if is_bytes else JSON,
                    timeout_s=timeout_s,
                )
            return json.loads(answer) if answer else None

        return retried(send, patience_s=patience_s, others=self.others)

    @property
    def others(self) -> int:
        """The number of nodes besides the current one."""
        return 0 if self.url is None else len(nodes.nodes_of(self.url)) - 1

    def each_node(self) -> "list[BusLocation]":
        """Each node alone, beginning with the one to ask now."""
        if self.url is None:
            return [self]
        return [replace(self, url=one) for one in nodes.in_order(self.url)]

    @contextlib.contextmanager
    def leaving(self, url: str) -> Iterator[None]:
        """Inside the block, switch to another node if the one at `url` is unavailable."""
        try:
            yield
        except PolybusError as error:
            if self.url is not None and error.code in nodes.MOVES:
                nodes.leave(self.url, url)
            raise


class Retry:
    """Waits with back-off between the attempts of one call."""

    def __init__(self, patience_s: float, *, others: int = 0) -> None:
        """`others` is the number of further nodes, which are asked before it waits."""
        self._patience_s = patience_s
        self._others = self._unasked = others
        self.reset()

    def reset(self) -> None:
        """Start over, because an attempt made progress."""
        self._backoff = Backoff(delay_s_max=1.0)
        self._deadline_s: float | None = None

    def wait(self, error: PolybusError) -> None:
        """Wait before the next attempt; raise the error if another attempt is useless."""
        is_away = error.code in nodes.MOVES
        if is_away and self._unasked:
            self._unasked -= 1
            return
        if self._deadline_s is None:
            # From the first failure on: a node may itself have waited some time for its cluster.
            self._deadline_s = time.monotonic() + self._patience_s
        pause_s = self._backoff.next_s()
        is_temporary = is_away or isinstance(error, BusyError)
        if not is_temporary or time.monotonic() + pause_s > self._deadline_s:
            raise error
        time.sleep(pause_s)
        self._unasked = self._others


def retried(work: Callable[[], T], *, patience_s: float, others: int = 0) -> T:
    """Do idempotent work; retry for up to `patience_s` while the bus is unavailable or busy.

    `others` is the number of further nodes: after a failure the work asks the next of them.
    """
    retry = Retry(patience_s, others=others)
    while True:
        try:
            return work()
        except PolybusError as error:
            retry.wait(error)


def find_location(given: Mapping[str, str]) -> BusLocation:
    """Option `data`, `url` or `log`, else the variable POLYBUS_DATA, else ./polybus-data.

    Paths become absolute because a task may run in another folder.

    Raises:
        UsageError: `data.not-found` if nothing is given and ./polybus-data does not exist;
        `spark.option-invalid` for the options of a cluster. StorageError: `log.damaged` if the
        folder does not say where its messages are.
    """
    if given.get("log"):
        return BusLocation(cluster=_cluster_of(given), is_cluster_only=True)
    token = given.get("token") or None
    url = given.get("url")
    folder = given.get("data") or os.environ.get(DATA_VARIABLE) or DEFAULT_FOLDER
    data = Path(folder).expanduser().absolute()
    if url and not given.get("data"):
        return BusLocation(data, ",".join(nodes.nodes_of(url)), token)
    if folder == DEFAULT_FOLDER and not data.is_dir():
        text = f"there is no log: {data} does not exist; set option data (a folder) or url (a bus)"
        raise UsageError("data.not-found", text)
    if token is not None and token == read_token(data):
        token = None
    return BusLocation(data, None, token, read_location(data) if token is None else None)


def _cluster_of(given: Mapping[str, str]) -> ClusterLocation:
    """The cluster that options name. Raises UsageError `spark.option-invalid`."""
    nested: dict[str, Any] = {"log": given["log"]}
    for name, value in given.items():
        if name in CLUSTER_OPTIONS:
            *above, last = name.removeprefix("cluster.").split(".")
            part = nested.setdefault(above[0], {}) if above else nested
            part[last] = value
    try:
        brokers_of(given["log"])
        place = convert(nested, ClusterLocation)
    except (ConfigError, msgspec.ValidationError) as error:
        text = getattr(error, "text", str(error))
        raise UsageError("spark.option-invalid", f"options log and cluster.…: {text}") from error
    return with_absolute_paths(place)


def cluster_options(place: ClusterLocation) -> dict[str, str]:
    """A cluster as options of the source."""
    found = {"log": place.log}
    for name in CLUSTER_OPTIONS:
        value: Any = place
        for part in name.removeprefix("cluster.").replace("-", "_").split("."):
            value = getattr(value, part, None)
        if value:
            found[name] = str(value)
    return found
