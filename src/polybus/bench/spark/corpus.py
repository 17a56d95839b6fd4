"""The messages that are read: written to a log, as the bus would, and handed over to history."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

from polybus import config
from polybus.batch import Batch
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.layout import index_path

TOPIC = "bench.readings"
MESSAGE_BYTES = 100
BATCH_MESSAGES = 10_000
START_US = 1_760_000_000_000_000
STEP_US = 10_000
# Different enough that nothing compresses, few enough that making them costs nothing.
BUFFERS = 64

Progress = Callable[[int], None]
"""Told how many messages are there so far."""


def write_corpus(folder: Path, messages: int, progress: Progress) -> tuple[Path, Path]:
    """Two data folders with the same messages: in the journal, and handed over to history."""
    journal, history = folder / "journal", folder / "history"
    journal.mkdir(parents=True)
    _write_log(journal, messages, progress)
    shutil.copytree(journal, history)
    for segment in hand_over(history):
        segment.unlink()
        index_path(segment).unlink()
    return journal, history


def _write_log(data: Path, messages: int, progress: Progress) -> None:
    now_us = START_US
    log = FileLog(
        data,
        durability="interval",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=lambda: now_us,
        maintenance=False,
    )
    try:
        log.create_topic(TOPIC)
        buffers = [os.urandom(BATCH_MESSAGES * MESSAGE_BYTES) for _ in range(BUFFERS)]
        whole = _spans(BATCH_MESSAGES)
        written = 0
        while written < messages:
            count = min(BATCH_MESSAGES, messages - written)
            buffer = buffers[written // BATCH_MESSAGES % BUFFERS]
            batch = Batch(TOPIC, buffer, whole if count == BATCH_MESSAGES else _spans(count))
            batch.protocol, batch.sender = "boson-frames", "127.0.0.1:50000"
            now_us += STEP_US
            batch.timestamp_us = now_us
            log.append(batch)
            written += count
            if written % (BATCH_MESSAGES * 50) == 0:
                # What waits to be written is in memory.
                log.sync()
                progress(written)
        log.sync()
        log.seal()
    finally:
        log.close()


def _spans(count: int) -> array[int]:
    spans = array("i")
    for index in range(count):
        spans.extend((index * MESSAGE_BYTES, (index + 1) * MESSAGE_BYTES))
    return spans
