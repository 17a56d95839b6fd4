"""The values of options: numbers, times, offsets; what is wrong with one names its option."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from polybus import names
from polybus.errors import UsageError

EARLIEST = -2
LATEST = -1
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_NUMBER_MAX = (1 << 63) - 1
_DURATION = re.compile(r"([0-9]{1,12})\s*(ms|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?")
_UNITS_MS = {"m": 60_000, "s": 1000, "h": 3_600_000, "d": 86_400_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def invalid(option: str, text: str) -> UsageError:
    return UsageError("spark.option-invalid", f"option {option}: {text}")


def conflict(one: str, other: str, text: str) -> UsageError:
    return UsageError("spark.option-conflict", f"options {one} and {other}: {text}")


def number(given: Mapping[str, str], option: str) -> int | None:
    """A number of one or more."""
    text = given.get(option)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,19}", text.strip()) or not 0 < int(text) <= _NUMBER_MAX:
        raise invalid(option, f"{text!r} is not a whole number of 1 or more")
    return int(text)


def boolean(given: Mapping[str, str], option: str, default: bool) -> bool:
    text = given.get(option)
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise invalid(option, f"it is true or false, not {text!r}")
    return text.strip().lower() == "true"


def duration_ms(given: Mapping[str, str], option: str, default: int) -> int:
    """A time span like 500ms, 30s, 15m or 1h; without a unit it is milliseconds."""
    text = given.get(option)
    if text is None:
        return default
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise invalid(option, f"{text!r} is not a time span like 500ms, 30s, 15m or 1h")
    unit = found[2] or "ms"
    return int(found[1]) * (1 if unit == "ms" else _UNITS_MS[unit[0]])


def timestamp_us(given: Mapping[str, str], option: str) -> int | None:
    """A time: milliseconds since 1970, as Kafka has it, or ISO 8601 with a zone."""
    text = given.get(option)
    if text is None:
        return None
    text = text.strip()
    if re.fullmatch("[0-9]{1,15}", text):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        wanted = "milliseconds since 1970, or like 2026-01-31T12:00:00Z (with its zone)"
        raise invalid(option, f"{text!r} is not a time: {wanted}")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def offsets_of(
    given: Mapping[str, str], option: str, default: int
) -> tuple[int, Mapping[str, int]]:
    """`earliest`, `latest` or JSON per topic: for all topics, and for those that are named.

    JSON is as Kafka has it, {"topic": {"0": 23}} with -2 for earliest and -1 for latest, or
    simpler, {"topic": 23} or {"topic": "earliest"}.
    """
    text = given.get(option)
    if text is None:
        return default, {}
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return word, {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise invalid(option, f"it is earliest, latest or JSON per topic: {error}") from error
    if not isinstance(found, dict) or not found:
        raise invalid(option, 'it is earliest, latest or JSON like {"topic": 23}')
    return default, {
        names.canonical(topic): _offset(option, topic, value) for topic, value in found.items()
    }


def topics_of(given: Mapping[str, str], option: str) -> frozenset[str]:
    """A JSON list of topics: a name may have a comma in it."""
    text = given.get(option)
    if text is None:
        return frozenset()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise invalid(option, f"it is a JSON list of topics: {error}") from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise invalid(option, 'it is a JSON list of topics like ["orders"]')
    return frozenset(names.canonical(one) for one in found)


def _offset(option: str, topic: str, value: object) -> int:
    if isinstance(value, dict):
        if set(value) != {"0"}:
            raise invalid(option, f'topic {topic!r}: a topic has one partition, "0"')
        value = value["0"]
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or not -2 <= value <= _NUMBER_MAX:
        raise invalid(option, f"topic {topic!r}: {value!r} is not an offset")
    return value
