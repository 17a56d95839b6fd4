"""The check of metadata files beside the log, each with a checksum (log/checked_json.py).

Every `*.json` of a pipeline is one, except its status and the state that Spark writes.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from polybus.log import checked_json
from polybus.log.cluster_location import NAME as CLUSTER
from polybus.log.copying import NOTE as MIGRATION
from polybus.log.delta import NEWEST
from polybus.log.layout import CONFIG_SEEN
from polybus.log.spark_checkpoint import crc_of

FOR_DISPLAY = ("status.json", "errors.json")
DISPENSABLE = ("standard-settings.json", "standard-watch.json", "view.json", NEWEST, CONFIG_SEEN)
"""Files whose readers work without them: damage is reported, but needs no repair."""


def metadata_damages(data: Path) -> Iterator[tuple[Path, str]]:
    """Every damaged file, with the reason."""
    tables = ("tables/*", "accounts/*/topics/*/table", "accounts/*/tables/*")
    places = [path for one in tables for path in data.glob(f"{one}/{NEWEST}")]
    places += [*data.glob("pipeline/**/*.json"), *data.glob(f"accounts/*/{CONFIG_SEEN}")]
    for path in sorted([data / CLUSTER, data / MIGRATION, *places]):
        # Its writer replaces or removes it right now.
        with suppress(FileNotFoundError):
            is_note = path.name not in FOR_DISPLAY and not crc_of(path).exists()
            if is_note and (reason := checked_json.problem(path.read_bytes())):
                yield path, reason
