"""Conditions on messages, as `polybus tail --where` has them: `price > 10`, `header.kind = order`.

The left side is `topic`, `text` (the whole value), `header.NAME`, or a path into a JSON value:
`order.lines[0].id`. The operators are = != > >= < <= and ~ (a regular expression that is found).
Numbers are compared with numbers; a message without the field never matches, except with !=.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from polybus.client import Message
from polybus.errors import UsageError

_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(!=|>=|<=|=|>|<|~)\s*(.*?)\s*", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")
_MISSING = object()
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
Test = Callable[[Message], bool]


def condition(text: str) -> Test:
    """The test of a condition. Raises UsageError `where.invalid`."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError("where.invalid", f"{text[:40]!r} is not FIELD OPERATOR VALUE")
    left, sign, right = found.groups()
    if sign == "~":
        return _matching(left, right)
    wanted = _literal(right)
    if sign in _COMPARE:
        compare = _COMPARE[sign]

        def fits(message: Message) -> bool:
            value = _field(message, left)
            if value is _MISSING:
                return False
            if _are_numbers(value, wanted):
                return compare(value, wanted)
            return compare(_text(value), right)

        return fits

    def equals(message: Message) -> bool:
        value = _field(message, left)
        is_same = value == wanted or _text(value) == (wanted if isinstance(wanted, str) else right)
        return is_same == (sign == "=")

    return equals


def _matching(left: str, right: str) -> Test:
    try:
        pattern = re.compile(right)
    except re.error as error:
        raise UsageError("where.invalid", f"{right[:40]!r}: {error}") from error

    def found(message: Message) -> bool:
        value = _text(_field(message, left))
        return value is not None and pattern.search(value) is not None

    return found


def _field(message: Message, path: str) -> Any:
    if path == "topic":
        return message.topic
    if path == "text":
        return message.value.decode(errors="replace")
    if path.startswith("header."):
        found = message.headers.get(path.removeprefix("header."), _MISSING)
        return found.decode(errors="replace") if isinstance(found, bytes) else found
    try:
        value: Any = msgspec.json.decode(message.value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _MISSING
    for step in _STEP.findall(path.removeprefix("$")):
        if step.startswith("[") and isinstance(value, list):
            number = int(step[1:-1])
            value = value[number] if number < len(value) else _MISSING
        else:
            value = value.get(step, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _literal(text: str) -> Any:
    """A number, true, false, null or a quoted text as JSON has it; anything else is text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _text(value: Any) -> str | None:
    if value is _MISSING:
        return None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
