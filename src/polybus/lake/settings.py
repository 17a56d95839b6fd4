"""DATA/pipeline/settings.json: the settings of the bus for the pipeline, another process.

The bus writes the file at every start, and the pipeline reads it before every micro-batch. So a
change needs only a restart of the bus.
"""

from pathlib import Path

import msgspec

from polybus.config import Config, DeclaredTopic, Pipeline
from polybus.errors import StorageError
from polybus.log.disk import Disk, replace_file
from polybus.log.topics import storage_error

PATH = "pipeline/settings.json"


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The group `pipeline` of the config, and the topics with settings for decoding."""

    pipeline: Pipeline = Pipeline()
    topics: tuple[DeclaredTopic, ...] = ()


def write(data: Path, config: Config) -> None:
    """Write the settings. Raises StorageError `log.full`, `log.failed`."""
    declared = tuple(
        topic
        for topic in config.topic_list()
        if topic.format != "any" or topic.schema or topic.message_id or topic.event_time
    )
    settings = PipelineSettings(pipeline=config.pipeline, topics=declared)
    path = data / PATH
    try:
        Disk().make_folder(path.parent)
        replace_file(path, msgspec.json.encode(settings), Disk())
    except OSError as error:
        raise storage_error(error, f"cannot write {path}") from error


def read(data: Path) -> PipelineSettings:
    """Read the settings; the defaults if no bus has written any.

    Raises:
        StorageError: `pipeline.settings`, the file is damaged.
    """
    path = data / PATH
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return PipelineSettings()
    except OSError as error:
        raise storage_error(error, f"cannot read {path}") from error
    try:
        return msgspec.json.decode(content, type=PipelineSettings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"{path}: {error}; restart the bus to replace the file"
        raise StorageError("pipeline.settings", text) from error
