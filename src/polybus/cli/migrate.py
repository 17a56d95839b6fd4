"""`polybus migrate`: copy the topics of a bus from files to Kafka, or back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec

from polybus.cli.common.options import config_option, json_option, load_config
from polybus.cli.common.output import count, echo_json, echo_table, progress_bar
from polybus.config import Config
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.cluster_location import check_location
from polybus.log.copying import (
    CopiedTopic,
    CopyTarget,
    FilesTarget,
    PayloadsInFiles,
    copied_topics,
    copy_topic,
)
from polybus.log.interface import Log, LogCallbacks

KAFKA = "kafka://"
COLUMNS = ("topic", "messages", "first", "epoch", "positions")


@click.command(
    epilog="""\b
Examples:
  polybus migrate --from /var/lib/polybus --to kafka://kafka1:9092,kafka2:9092,kafka3:9092
  polybus migrate --from kafka://kafka1:9092 --to /var/lib/polybus-files --topic orders
"""
)
@click.option("--from", "source", required=True, help="A data folder, or kafka://HOST:PORT,…")
@click.option("--to", "target", required=True, help="A data folder, or kafka://HOST:PORT,…")
@click.option("--topic", "chosen", multiple=True, help="Copy only this topic; may be repeated.")
@config_option
@json_option
def migrate(
    source: str, target: str, chosen: tuple[str, ...], config_path: str | None, as_json: bool
) -> None:
    """Copy topics with all their messages from files to Kafka, or from Kafka to files.

    The bus must be stopped. Nothing is removed from the source. After an interruption, run it
    again: it continues. Each topic is verified when it is copied.

    In Kafka topics keep their epochs and offsets, so that readers continue at their positions. In
    files topics get new epochs. Settings of `cluster` come from the config file or the environment.
    """
    if source.startswith(KAFKA) == target.startswith(KAFKA):
        raise click.UsageError(f"one of --from and --to is a folder, the other begins with {KAFKA}")
    config = load_config(None, config_path)
    if not source.startswith(KAFKA) and not Path(source).is_dir():
        raise UsageError("log.no-data", f"there is no data folder {source}")
    check_location(_settings(config, source if target.startswith(KAFKA) else target))
    refused: list[PolybusError] = []
    callbacks = LogCallbacks(on_refused=lambda _, error: refused.append(error))
    with ExitStack() as stack:
        read = stack.enter_context(_opened(config, source))
        written = stack.enter_context(_opened(config, target, callbacks))
        to = _target(target, written)
        payloads = PayloadsInFiles(Path(source), config.limits.message_bytes_max)
        topics = copied_topics(read, chosen)
        if isinstance(to, FilesTarget):
            to.begin({topic: read.bounds(topic) for topic in topics})
        update = stack.enter_context(progress_bar("copying"))
        # Each message is copied once, and read once more on both sides.
        update(total=3 * sum(_messages(read, topic) for topic in topics))
        copied = []
        for topic in topics:
            payload = None if source.startswith(KAFKA) else payloads.of(topic)

            def progress(topic: str, messages: int) -> None:
                update(description=topic, advance=messages)

            try:
                copied.append(copy_topic(topic, read, to, payload=payload, progress=progress))
            except StorageError:
                if refused:
                    raise refused[0] from None
                raise
        if isinstance(to, FilesTarget):
            to.finish(chosen)
    _print(copied, as_json)


@contextmanager
def _opened(config: Config, where: str, callbacks: LogCallbacks | None = None) -> Iterator[Log]:
    """Raises StorageError `log.locked`, a bus runs on the folder; as `open_log`."""
    from polybus.edges.node import open_log

    with ExitStack() as stack:
        settings = _settings(config, where)
        if where.startswith(KAFKA):
            # A node needs a folder; this one is temporary.
            folder = stack.enter_context(TemporaryDirectory(prefix="polybus-migrate-"))
            settings = msgspec.structs.replace(settings, data=folder, log=where)
        log = open_log(settings, callbacks)
        stack.callback(log.close)
        yield log


def _settings(config: Config, where: str) -> Config:
    return msgspec.structs.replace(config, data=where, log="files", durability="fsync")


def _target(where: str, log: Log) -> CopyTarget:
    if not where.startswith(KAFKA):
        return FilesTarget(Path(where), log)
    from polybus.log.kafka.importing import KafkaTarget
    from polybus.log.kafka.log import KafkaLog

    assert isinstance(log, KafkaLog)
    return KafkaTarget(log)


def _messages(log: Log, topic: str) -> int:
    bounds = log.bounds(topic)
    return bounds.stop - bounds.start


def _print(copied: list[CopiedTopic], as_json: bool) -> None:
    if as_json:
        echo_json(
            [
                {
                    "topic": one.topic,
                    "messages": one.messages,
                    "epoch": one.epoch,
                    "first-offset": one.start,
                    "keeps-positions": one.keeps_positions,
                }
                for one in copied
            ]
        )
        return
    rows = [
        [
            one.topic,
            count(one.messages),
            one.start,
            one.epoch,
            "kept" if one.keeps_positions else "new",
        ]
        for one in copied
    ]
    echo_table(COLUMNS, rows)
