"""DATA/pipeline/settings.json: the settings of the bus for the pipeline, another process.

The bus writes the file when it starts and when it reloads its settings (SIGHUP), and the pipeline
reads it before every micro-batch. So a change needs no restart.
"""

from pathlib import Path

import msgspec

from polybus.config import Config, DeclaredTable, DeclaredTopic, Pipeline
from polybus.errors import StorageError
from polybus.log import checked_json
from polybus.log.disk import Disk, replace_file
from polybus.log.topics import storage_error

PATH = "pipeline/settings.json"


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The group `pipeline` of the config, topics with settings for decoding, and users' tables."""

    pipeline: Pipeline = Pipeline()
    topics: tuple[DeclaredTopic, ...] = ()
    tables: tuple[DeclaredTable, ...] = ()


def write(data: Path, config: Config) -> None:
    """Write the settings. Raises StorageError `log.full`, `log.failed`."""
    declared = tuple(topic for topic in config.topic_list() if topic.is_decoded_specially)
    tables = tuple(config.tables)
    settings = PipelineSettings(pipeline=config.pipeline, topics=declared, tables=tables)
    path = data / PATH
    try:
        Disk().make_folder(path.parent)
        replace_file(path, checked_json.encode(settings), Disk())
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
        return checked_json.decode(content, PipelineSettings, path, accept_unchecked=True)
    except StorageError as error:
        text = f"{error.text}; reload the bus (SIGHUP) to replace the file"
        raise StorageError("pipeline.settings", text) from error
