"""Problems: the API's errors as application/problem+json, with status and error code."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from polybus.errors import BusyError, PolybusError, StorageError, UsageError

STATUSES = {
    "topic.unknown": 404,
    "topic.exists": 409,
    "topic.recreated": 409,
    "topic.too-many": 409,
    "topic.reserved": 403,
    "admin.token": 401,
    "session.unknown": 404,
    "consumer.unknown": 404,
    "consumer.too-many": 409,
    "session.too-many": 503,
    "log.offset-unknown": 416,
    "commit.gap": 409,
    "commit.query": 409,
    "commit.too-many": 409,
    "commit.unknown": 404,
    "commit.too-large": 413,
    "commit.value-too-large": 413,
    "staging.full": 507,
    "staging.in-use": 409,
    "staging.position": 409,
    "http.body-too-large": 413,
    "http.not-found": 404,
    "http.method": 405,
    "http.content-type": 415,
}


class Problem(msgspec.Struct, kw_only=True):
    """An error, as RFC 9457 defines it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str


def problem(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> Response:
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=text, code=code)
    return Response(
        msgspec.json.encode(body), status, headers, media_type="application/problem+json"
    )


def problem_of(error: PolybusError, headers: dict[str, Any] | None = None) -> Response:
    """The answer for an error."""
    status = STATUSES.get(error.code)
    if status is None:
        status = 503 if isinstance(error, StorageError | BusyError) else 400
    return problem(status, error.code, error.text, headers)


def unknown_session() -> UsageError:
    # The same answer whether it never existed, expired or was deleted.
    return UsageError("session.unknown", "the session does not exist or has expired")
