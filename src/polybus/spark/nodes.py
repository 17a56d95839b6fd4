"""Several nodes of one bus in option `url`: `http://a:55545,http://b:55545`.

A process asks the first node, and after a failure the next one, and stays with it. All nodes refuse
the same requests, so only a node that is unavailable, or cut off from its cluster, is left.
"""

from polybus.client.http.blocking import GONE

MOVES = (*GONE, "log.unreachable", "log.closed")
"""The codes of a node that is unavailable or has lost its cluster: another one may answer."""
LISTS_MAX = 100

# No lock: threads that overwrite each other here only ask a node once more.
_current: dict[str, str] = {}


def nodes_of(url: str) -> list[str]:
    """The addresses in an option; those without a scheme get that of the first."""
    found = [one.strip().rstrip("/") for one in url.split(",") if one.strip()]
    scheme = found[0].partition("://")[0] if found and "://" in found[0] else "http"
    return list(dict.fromkeys(one if "://" in one else f"{scheme}://{one}" for one in found))


def in_order(url: str) -> list[str]:
    """All nodes, beginning with the one to ask now."""
    found = nodes_of(url)
    current = _current.get(url)
    at = found.index(current) if current in found else 0
    return found[at:] + found[:at]


def leave(url: str, node: str) -> None:
    """Switch to the node after this one, unless that has already happened."""
    found = nodes_of(url)
    if node in found and _current.get(url, found[0]) == node:
        if len(_current) >= LISTS_MAX:
            _current.clear()
        _current[url] = found[(found.index(node) + 1) % len(found)]
