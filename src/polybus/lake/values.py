"""Converts values of rows for JSON."""

from base64 import b64encode
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any


def plain(value: Any, other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Bytes as text, or {"base64": …} if not UTF-8; maps as objects; other types by `other`."""
    if isinstance(value, dict):
        return {str(name): plain(one, other) for name, one in value.items()}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": b64encode(value).decode()}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {str(plain(name, other)): plain(one, other) for name, one in value}
        return [plain(one, other) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return other(value)
