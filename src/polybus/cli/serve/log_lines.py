"""The lines that the bus writes to standard error: for people, or as JSON for programs."""

import logging
import sys
from datetime import UTC, datetime

import msgspec

from polybus.config import LogLines

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextLines(logging.Formatter):
    """One line per message, whatever is in it; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in super().formatMessage(record)
        )


class JsonLines(logging.Formatter):
    """One JSON object per line, whatever is in a message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # What a peer sent may not be UTF-8.
        clean = {name: text.encode(errors="replace").decode() for name, text in line.items()}
        return msgspec.json.encode(clean).decode()


def start(settings: LogLines, *, verbose: bool) -> None:
    """Write the lines that the settings ask for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(level=min(level, logging.INFO) if verbose else level, handlers=[handler])
