"""DATA/cluster.json: the Kafka cluster that has the messages of a node.

A node writes it into its data folder when it starts, so that other programs that read the data
folder (Spark, SQL) find the cluster. It names files that contain secrets, but contains none itself.

A folder has either this file or polybus.json, which belongs to a log in files. A process that opens
a log first checks for the other file, and refuses the folder if it exists: an empty log of the
other kind would hide the messages. The order of writes:

    Kafka:  1. the lock    2. cluster.json    3. everything else that the node keeps
    files:  1. the lock    2. polybus.json    3. the topics

A crash before 2 leaves a folder with nothing but the lock, which may become either. No start
removes either file: an operator who wants a log in files in the folder removes cluster.json.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from polybus.config import Config, KafkaLogin, KafkaTls
from polybus.errors import ConfigError
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.log.topics import read_data_metadata, storage_error

NAME = "cluster.json"


class ClusterLocation(
    msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True
):
    """A bus in a Kafka cluster, described by its settings."""

    log: str
    prefix: str = ""
    tls: KafkaTls | None = None
    login: KafkaLogin | None = None

    def __str__(self) -> str:
        return f"{self.log} with prefix {self.prefix}" if self.prefix else self.log


def location_of(config: Config) -> ClusterLocation:
    """The location that the settings of a node name."""
    cluster = config.cluster
    return with_absolute_paths(
        ClusterLocation(log=config.log, prefix=cluster.prefix, tls=cluster.tls, login=cluster.login)
    )


def with_absolute_paths(place: ClusterLocation) -> ClusterLocation:
    """The same location for processes that run in other folders."""
    tls, login = place.tls, place.login
    if tls is not None:
        tls = KafkaTls(ca=_absolute(tls.ca), cert=_absolute(tls.cert), key=_absolute(tls.key))
    if login is not None:
        path = str(Path(login.password_file).absolute())
        login = msgspec.structs.replace(login, password_file=path)
    return msgspec.structs.replace(place, tls=tls, login=login)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def read_location(data: Path) -> ClusterLocation | None:
    """The cluster that has the messages of a data folder; None if its files have them.

    Raises StorageError if the file is damaged (`log.damaged`) or cannot be read.
    """
    path = data / NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, f"cannot read {path}") from error
    return checked_json.decode(content, ClusterLocation, path)


def write_location(data: Path, place: ClusterLocation) -> None:
    """Raises StorageError."""
    path = data / NAME
    try:
        replace_file(path, checked_json.encode(place), Disk())
    except OSError as error:
        raise storage_error(error, f"cannot write {path}") from error


def check_location(config: Config) -> None:
    """Refuse a folder whose messages are not where the settings look for them.

    Raises ConfigError `config.log`; StorageError `log.damaged`.
    """
    data = Path(config.data)
    if config.is_cluster:
        if read_data_metadata(data) is not None:
            text = f"{data} has messages in files, which `log` would hide"
            raise ConfigError("config.log", f"{text}; name another folder with --data")
        return
    place = read_location(data)
    if place is not None:
        text = f"{data} belongs to a node whose messages are in {place}, which a log in files would"
        what = f'hide; use its settings (--config, or log = "{place.log}"), or name another folder'
        how = f"with --data; to begin an empty bus there, remove {data / NAME}"
        raise ConfigError("config.log", f"{text} {what} {how}")
