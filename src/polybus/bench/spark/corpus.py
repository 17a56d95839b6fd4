"""The messages that the benchmark reads: in a log as the bus writes it, and in history."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable
from dataclasses import dataclass
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
# Enough random bytes that nothing compresses, few enough that making them costs little.
BUFFERS = 64


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two data folders with the same messages, and a folder for temporary files."""

    journal: Path
    history: Path
    scratch: Path
    messages: int


def write_corpus(folder: Path, messages: int, tell: Callable[[str], None]) -> Corpus:
    """Write the messages to a journal, and a copy of it to history."""
    journal, history = folder / "journal", folder / "history"
    journal.mkdir(parents=True)
    _write_log(journal, messages, tell)
    shutil.copytree(journal, history)
    for segment in hand_over(history):
        segment.unlink()
        index_path(segment).unlink()
    return Corpus(journal, history, folder / "scratch", messages)


def _write_log(data: Path, messages: int, tell: Callable[[str], None]) -> None:
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
                # Messages that are not written yet are in memory.
                log.sync()
                tell(f"writing {written / 1e6:.1f} of {messages / 1e6:g} M messages")
        log.sync()
        log.seal()
    finally:
        log.close()


def _spans(count: int) -> array[int]:
    spans = array("i")
    for index in range(count):
        spans.extend((index * MESSAGE_BYTES, (index + 1) * MESSAGE_BYTES))
    return spans
