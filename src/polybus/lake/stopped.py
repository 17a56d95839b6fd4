"""DATA/pipeline/standard-stopped.json: the topics that a batch left out, and where they continue.

A batch leaves out a topic if `expect-or-fail` must stop it, because messages do not meet a
condition, or if one of its files was damaged after the batch was planned. Before its first commit
the batch records here where the topic continues, so that it does the same if it runs again. The
source then rewinds the topic to that offset, and the other topics continue. A topic that an
expectation has stopped stays there until the config has other conditions. A later batch removes the
record, after its commits of all tables except `deliveries`, which has other messages. That is the
batch that stores the messages or, after damage, the next one, because then the source itself holds
the topic in place.

Order of writes: the record, the commits of the batch that left the topic out, the commits of the
later batch, the removal of the record. So a batch that runs again finds its own decision.

The file has a checksum: a wrong offset would skip messages, or repeat them. Without the file a
stopped topic continues after the batch that left it out.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from polybus.errors import StorageError
from polybus.lake import settings as pipeline_settings
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.log.topics import storage_error
from polybus.structs import decode

PATH = "pipeline/standard-stopped.json"
ADVICE = (
    "correct or remove the condition in the config and reload the bus (SIGHUP): the topic then "
    "continues there by itself"
)


class StoppedTopic(msgspec.Struct, frozen=True):
    """Where a topic continues, why it was stopped, and by which batch and conditions.

    Without conditions, it was stopped because of damage.
    """

    epoch: int
    offset: int
    reason: str
    conditions: dict[str, str]
    writer: str
    batch: int

    @property
    def text(self) -> str:
        """For users: what happened, and what to do."""
        return f"stopped at offset {self.offset}: {self.reason}; {ADVICE}"


class StoppedContent(msgspec.Struct, frozen=True):
    """The content of the file."""

    topics: Mapping[str, StoppedTopic]


def read(data: Path) -> dict[str, StoppedTopic]:
    """The stopped topics, whose messages are not in any table yet.

    Raises:
        StorageError: `pipeline.settings`, the file is damaged.
    """
    path = data / PATH
    try:
        content = path.read_bytes()
        if checked_json.is_checked(content):
            return dict(checked_json.decode(content, StoppedContent, path).topics)
        # Earlier versions wrote only this. No damage turns a checked file into it.
        return decode(content, dict[str, StoppedTopic])
    except FileNotFoundError:
        return {}
    except (StorageError, msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = error.text if isinstance(error, StorageError) else f"{path}: {error}"
        text = f"{reason}; restore it, or remove it and give up messages of stopped topics"
        raise StorageError("pipeline.settings", text) from error


def write(data: Path, topics: Mapping[str, StoppedTopic]) -> None:
    """Store the topics, durably. Raises StorageError `log.full`, `log.failed`."""
    path = data / PATH
    try:
        Disk().make_folder(path.parent)
        replace_file(path, checked_json.encode(StoppedContent(topics)), Disk())
    except OSError as error:
        raise storage_error(error, f"cannot write {path}") from error


def still_stopped(data: Path, topics: Mapping[str, StoppedTopic]) -> dict[str, str]:
    """The topics whose conditions are still those of the config, each with what to do."""
    if not topics:
        return {}
    now = {one.name: one.expect_or_fail for one in pipeline_settings.read(data).topics}
    topics = {name: one for name, one in topics.items() if one.conditions}
    return {name: one.text for name, one in topics.items() if now.get(name, {}) == one.conditions}
