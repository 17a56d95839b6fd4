"""A schema for a topic, proposed from its messages (`polybus topics infer`).

A field gets the narrowest type that fits nearly all of its values: up to `outliers_max` of the
messages may not fit, and would go to quarantine. Whether a value fits a type is judged as Spark
does when it decodes: it converts texts to numbers, for example. A field that has values of several
kinds is VARIANT, any JSON. A field that no fitting message lacks is NOT NULL.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from polybus.errors import UsageError
from polybus.lake.typed import ABOUT

FIELDS_MAX = 200
DEPTH_MAX = 16
_LONG = 1 << 63
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?")
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
"""Longer numbers do not fit into 64 bits, and Python refuses to parse very long ones."""
_BAD_NAME = set("'\"\\`")


@dataclass
class Proposal:
    """A schema for a topic, and its effect on the messages that were read.

    `quarantined` counts them by reason; `left_out` are fields that a schema cannot have.
    """

    schema: str
    messages: int
    quarantined: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def fitting(self) -> int:
        return self.messages - sum(self.quarantined.values())


def infer(values: Iterable[bytes], *, outliers_max: float) -> Proposal:
    """Propose a schema. `outliers_max` is the share of messages that a field's type may exclude.

    Raises:
        UsageError: `topic.no-schema`, no message is a JSON object with fields.
    """
    reasons: Counter[str] = Counter()
    objects: list[dict[str, Any]] = []
    count = 0
    for value in values:
        count += 1
        try:
            found = json.loads(value, parse_constant=_refuse, object_pairs_hook=_object)
        except (ValueError, RecursionError):
            reasons["not JSON"] += 1
            continue
        if isinstance(found, dict):
            objects.append(found)
        else:
            reasons["not an object"] += 1
    names = list(dict.fromkeys(name for one in objects for name in one))
    left_out = _unusable(names)
    names = [name for name in names if name not in left_out]
    left_out += names[FIELDS_MAX:]
    names = names[:FIELDS_MAX]
    if not names:
        text = f"none of the {count} messages is a JSON object with fields"
        raise UsageError("topic.no-schema", text)
    kinds = {
        name: column_type([one[name] for one in objects if one.get(name) is not None], outliers_max)
        for name in names
    }
    good = []
    for one in objects:
        broken = [
            f"{name} is not of type {kind}"
            for name, kind in kinds.items()
            if one.get(name) is not None and not fits(one[name], kind)
        ]
        if broken:
            reasons["; ".join(broken)] += 1
        else:
            good.append(one)
    required = {name for name in names if good and all(one.get(name) is not None for one in good)}
    columns = [
        f"{_quoted(name)} {kind}{' NOT NULL' if name in required else ''}"
        for name, kind in kinds.items()
    ]
    return Proposal(", ".join(columns), count, dict(reasons.most_common()), left_out)


def _unusable(names: Sequence[str]) -> list[str]:
    """The names that a schema cannot have: a table ignores the case of names."""
    spellings = Counter(name.lower() for name in names)
    return [
        name
        for name in names
        if not _is_name(name) or spellings[name.lower()] > 1 or name.lower() == ABOUT
    ]


def column_type(values: Sequence[Any], outliers_max: float) -> str:
    """The narrowest type that fits all of the values but a few."""
    counts = Counter(_kind(value) for value in values)
    usual = {kind for kind, count in counts.items() if count > outliers_max * len(values)}
    if usual == {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    if usual == {"TIMESTAMP", "STRING"}:
        return "STRING"
    if len(usual) != 1:
        return "VARIANT"
    [kind] = usual
    if kind not in ("ARRAY", "STRUCT"):
        return kind
    return _nested([value for value in values if _kind(value) == kind], 1)


def _nested(values: Sequence[Any], depth: int) -> str:
    """The type of values inside an array or object, if all fit it; else text."""
    kinds = {_kind(value) for value in values if value is not None}
    if kinds == {"ARRAY"} and depth < DEPTH_MAX:
        return f"ARRAY<{_nested([item for value in values for item in value or ()], depth + 1)}>"
    if kinds == {"STRUCT"} and depth < DEPTH_MAX:
        names = list(dict.fromkeys(name for value in values for name in value or ()))
        is_clear = len({name.lower() for name in names}) == len(names)
        if names and len(names) <= FIELDS_MAX and is_clear and all(map(_is_name, names)):
            parts = [
                f"{_quoted(name)} {_nested([(one or {}).get(name) for one in values], depth + 1)}"
                for name in names
            ]
            return f"STRUCT<{', '.join(parts)}>"
        return "VARIANT" if depth == 1 else "STRING"
    if kinds == {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    return kinds.pop() if len(kinds) == 1 and not kinds & {"ARRAY", "STRUCT"} else "STRING"


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "BOOLEAN"
        case int():
            return "BIGINT" if -_LONG <= value < _LONG else "DOUBLE"
        case float():
            return "DOUBLE"
        case str():
            return "TIMESTAMP" if _time(value) else "STRING"
        case list():
            return "ARRAY"
        case dict():
            return "STRUCT"
    return "STRING"


def fits(value: Any, kind: str) -> bool:
    """Whether Spark converts a value that is not null to the type."""
    if kind in ("VARIANT", "STRING"):
        return True
    if kind.startswith(("ARRAY", "STRUCT")):
        return _kind(value) == kind.partition("<")[0]
    if isinstance(value, list | dict):
        return False
    match kind:
        case "BOOLEAN":
            is_word = isinstance(value, str) and value.strip().lower() in _WORDS
            return is_word or isinstance(value, bool | int | float)
        case "BIGINT":
            return _is_whole(value)
        case "DOUBLE":
            return not isinstance(value, str) or _is_number(value)
    if isinstance(value, str):
        return _time(value) or _time(f"{value}T00:00")
    # Seconds since 1970.
    return not isinstance(value, bool) and abs(value) < _LONG / 1_000_000


_WORDS = ("true", "t", "yes", "y", "1", "false", "f", "no", "n", "0")


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number in 64 bits, perhaps after truncation."""
    if isinstance(value, str):
        return bool(_WHOLE.fullmatch(value.strip())) and -_LONG <= int(value) < _LONG
    return math.isfinite(value) and -_LONG <= int(value) < _LONG


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_name(name: str) -> bool:
    return bool(name) and _BAD_NAME.isdisjoint(name)


def _quoted(name: str) -> str:
    """The name, in backticks if Spark needs them."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"`{name}`"
