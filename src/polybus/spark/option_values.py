"""The options of the source and the sink: known names, and text turned into checked values.

Every mistake is a UsageError that names the option: an unknown name (`spark.option-unknown`, with
the nearest known one), an invalid value (`spark.option-invalid`), or two options that contradict
each other (`spark.option-conflict`).
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from polybus import names
from polybus.errors import UsageError

EARLIEST = -2
LATEST = -1
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_NUMBER_MAX = (1 << 63) - 1
_DURATION = re.compile(r"([0-9]{1,12})\s*(ms|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?")
_UNITS_MS = {"m": 60_000, "s": 1000, "h": 3_600_000, "d": 86_400_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSETS = 'must be earliest, latest or JSON like {"topic": 23}'

T = TypeVar("T")


def invalid(option: str, text: str) -> UsageError:
    return UsageError("spark.option-invalid", f"option {option}: {text}")


def conflict(one: str, other: str, text: str) -> UsageError:
    return UsageError("spark.option-conflict", f"options {one} and {other}: {text}")


class GivenOptions:
    """The options that the user gave, by their proper names: Spark ignores case."""

    def __init__(
        self, options: Mapping[str, str], known: Collection[str], internal: Collection[str] = ()
    ) -> None:
        """Check the names. `internal` names are accepted, but not suggested to users.

        Raises:
            UsageError: `spark.option-unknown`; `spark.option-conflict`, both data and url.
        """
        proper = {name.lower(): name for name in (*known, *internal)}
        self._values: dict[str, str] = {}
        for name, value in options.items():
            if name.lower() not in proper:
                raise _unknown(name, known)
            self._values[proper[name.lower()]] = str(value)
        self.check_apart("data", "url")

    def __contains__(self, option: object) -> bool:
        return option in self._values

    def get(self, option: str) -> str | None:
        return self._values.get(option)

    def check_apart(self, one: str, other: str) -> None:
        """Raises UsageError `spark.option-conflict` if both are given."""
        if one in self and other in self:
            raise conflict(one, other, "give only one of them")

    def listed(self, option: str) -> list[str]:
        """A list with commas; empty if it is not given."""
        return [item.strip() for item in (self.get(option) or "").split(",") if item.strip()]

    def topic(self, option: str, name: str) -> str:
        """A topic's name in the form that the bus uses."""
        return self.checked(option, lambda: names.canonical(name.strip()))

    def checked(self, option: str, check: Callable[[], T]) -> T:
        """What a check returns; what it refuses is the fault of the option."""
        try:
            return check()
        except UsageError as error:
            raise invalid(option, error.text) from error

    def number(self, option: str) -> int | None:
        """A number of one or more."""
        text = self.get(option)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,19}", text.strip()) or not 0 < int(text) <= _NUMBER_MAX:
            raise invalid(option, f"{text!r} is not a whole number of 1 or more")
        return int(text)

    def boolean(self, option: str, default: bool) -> bool:
        text = self._values.get(option, str(default)).strip().lower()
        if text not in ("true", "false"):
            raise invalid(option, f"{text!r} is neither true nor false")
        return text == "true"

    def duration_ms(self, option: str, default: int) -> int:
        """A duration like 500ms, 30s, 15m or 1h; a number without unit is milliseconds."""
        text = self.get(option)
        if text is None:
            return default
        found = _DURATION.fullmatch(text.strip().lower())
        if found is None:
            raise invalid(option, f"{text!r} is not a duration like 500ms, 30s, 15m or 1h")
        unit = found[2] or "ms"
        return int(found[1]) * (1 if unit == "ms" else _UNITS_MS[unit[0]])

    def timestamp_us(self, option: str) -> int | None:
        """A time: milliseconds since 1970, as in Kafka, or ISO 8601 with a time zone."""
        text = self.get(option)
        if text is None:
            return None
        if re.fullmatch("[0-9]{1,15}", text.strip()):
            return int(text) * 1000
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            wanted = "milliseconds since 1970, or like 2026-01-31T12:00:00Z with a time zone"
            raise invalid(option, f"{text!r} is not a time: {wanted}")
        return (moment - _EPOCH) // timedelta(microseconds=1)

    def offsets(self, option: str, default: int) -> tuple[int, Mapping[str, int]]:
        """The offset for all topics, and the offsets of topics that are named.

        The value is `earliest`, `latest` or JSON by topic. JSON is as in Kafka, {"topic": {"0":
        23}} with -2 for earliest and -1 for latest, or simpler, {"topic": 23} or {"topic":
        "earliest"}.
        """
        text = self.get(option)
        if text is None:
            return default, {}
        word = _WORDS.get(text.strip().lower())
        if word is not None:
            return word, {}
        found = self._json(option, text, _OFFSETS)
        if not isinstance(found, dict) or not found:
            raise invalid(option, f"it {_OFFSETS}")
        return default, {
            self.topic(option, topic): _offset(option, topic, value)
            for topic, value in found.items()
        }

    def topics(self, option: str) -> frozenset[str]:
        """A JSON list of topics, because a name may contain a comma."""
        wanted = 'must be a JSON list of topics like ["orders"]'
        found = self._json(option, self._values.get(option, "[]"), wanted)
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise invalid(option, f"it {wanted}")
        return frozenset(self.topic(option, name) for name in found)

    def _json(self, option: str, text: str, wanted: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise invalid(option, f"it {wanted}: {error}") from error


def _unknown(name: str, known: Collection[str]) -> UsageError:
    proper = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), proper, 1, cutoff=0.5)
    hint = f"; did you mean {proper[near[0]]}?" if near else ""
    if name.lower() == "path":
        hint = "; use option data for a data folder"
    text = f"option {name} is unknown{hint} (known options: {', '.join(known)})"
    return UsageError("spark.option-unknown", text)


def _offset(option: str, topic: str, value: Any) -> int:
    if isinstance(value, dict):
        if set(value) != {"0"}:
            raise invalid(option, f'topic {topic!r}: a topic has only the partition "0"')
        value = value["0"]
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or not -2 <= value <= _NUMBER_MAX:
        raise invalid(option, f"topic {topic!r}: {value!r} is not an offset")
    return value
