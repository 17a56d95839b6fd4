"""The topics of a bus at a URL of any protocol: for patterns, and to suggest near names."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from polybus.client.http.blocking import opened
from polybus.client.options import parse
from polybus.errors import PolybusError, UsageError
from polybus.names import meant

ANSWER_TIMEOUT_S = 5.0
QUOTED = re.compile(r"there is no topic ['\"](.*)['\"]")


def topics_at(url: str) -> list[str]:
    """The readable topics. Raises PolybusError, also if the port does not speak HTTP."""
    return [one["name"] for one in _ask(url, "/v1/topics")["topics"]]


def epoch_at(url: str, topic: str) -> int:
    """The epoch of a topic now. Raises as `topics_at`."""
    return int(_ask(url, f"/v1/topics/{quote(topic, safe='')}")["epoch"])


def _ask(url: str, path: str) -> Any:
    address = parse(url)
    http = f"http{'s' if address.tls else ''}://{address.authority}"
    headers = {"accept": "application/json"}
    if address.credentials is not None:
        headers["authorization"] = address.credentials.authorization
    with opened(http, "GET", path, headers=headers, timeout_s=ANSWER_TIMEOUT_S) as answer:
        return json.loads(answer.read())


def expanded(topics: tuple[str, ...], url: str) -> tuple[str, ...]:
    """Topics, with patterns such as `*` and `orders.*` replaced by existing topics.

    Raises UsageError `topic.unknown` if nothing matches.
    """
    if not any("*" in topic for topic in topics):
        return topics
    known = topics_at(url)
    found: dict[str, None] = {}
    for topic in topics:
        matching = [one for one in known if fnmatchcase(one, topic.lower())]
        if "*" in topic and not matching:
            raise UsageError("topic.unknown", f"no topic matches {topic!r}")
        found |= dict.fromkeys(matching if "*" in topic else [topic])
    return tuple(found)


def suggested(error: PolybusError, known: Iterable[str]) -> PolybusError:
    """An error about an unknown topic with near names; any other as it is."""
    wrong = QUOTED.search(error.text)
    if error.code != "topic.unknown" or wrong is None:
        return error
    return UsageError(error.code, error.text + meant(wrong[1], known))


@contextlib.contextmanager
def suggesting(url: str) -> Iterator[None]:
    """Inside the block, an error about an unknown topic names near ones."""
    try:
        yield
    except PolybusError as error:
        if error.code != "topic.unknown":
            raise
        known: list[str] = []
        with contextlib.suppress(PolybusError, OSError, ValueError):
            known = topics_at(url)
        raise suggested(error, known) from error
