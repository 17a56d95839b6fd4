"""A data folder whose messages are in Kafka is known as such from the first start on."""

from __future__ import annotations

from pathlib import Path

from crash_kit import Run, crashes

from polybus.config import Config
from polybus.errors import ConfigError
from polybus.log.cluster_location import (
    ClusterLocation,
    check_location,
    read_location,
    write_location,
)

PLACE = ClusterLocation(log="kafka://127.0.0.1:1", prefix="shop.")


def note(run: Run) -> None:
    """What a node does before it keeps anything in the folder."""
    write_location(run.data, PLACE)
    run.acknowledge("noted")


def look(data: Path) -> str:
    """What a start without the settings of the node does."""
    try:
        check_location(Config(data=str(data)))
    except ConfigError as error:
        assert read_location(data) == PLACE
        return error.code
    return "a bus in files"


def test_the_note_of_a_cluster_is_there_or_not_whenever_the_start_was_killed() -> None:
    for crash in crashes(note, look, verified=False):
        assert crash.seen in ("a bus in files", "config.log"), crash
        if crash.acknowledged:
            assert crash.seen == "config.log", crash
        assert crash.end == "config.log", crash
