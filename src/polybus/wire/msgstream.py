"""msgstream: numbered packs of messages as JSON, the same for polls and WebSockets.

    {"1":[["some.event.name"],["another.event",{"some":"data"}]],"2":[["eventname",{"any":"data"}]]}

A pack is a list of messages; a message is `[type]` or `[type, data]`. Pack "0" is a notice: it is
outside the order and never stored. Clients confirm packs by their ids, separated by commas.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from polybus import scan
from polybus.batch import Batch
from polybus.errors import PeerError

PROTOCOL: Final = "msgstream"
PATHS: Final = ("/msgstream", "/msgstream/")
UNSET: Final = "session.unset"
OVERFLOW: Final = "session.overflow"
DAMAGED: Final = "topic.damaged"
SESSION_UNSET: Final = b'{"0":[["session.unset","noSession"]]}'
EMPTY_PACK: Final = b"[]"
PACK_MESSAGES_MAX: Final = 100_000
# JavaScript clients cannot represent integers beyond 2**53.
ID_DIGITS_MAX = 15
_DEPTH_MAX = 64
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")

_json = msgspec.json.encode
_raw_messages = msgspec.json.Decoder(list[list[msgspec.Raw]])
_string = msgspec.json.Decoder(str)


def encode_messages(batch: Batch, shown: str | None = None) -> bytes:
    """The batch as a pack's content: `[[topic, payload], …]`; the topic as shown to the client.

    A payload is the value itself if it is JSON, else a string if it is text, else its base64;
    `polybus.scan.packs_py` defines what counts as JSON.
    """
    head = b"[" + _json(shown or batch.topic) + b","
    return scan.encode_pack(head, batch.buffer, batch.spans, _DEPTH_MAX)


def join_contents(contents: Sequence[bytes]) -> bytes:
    """Join the contents of several packs."""
    if len(contents) == 1:
        return contents[0]
    return b"[" + b",".join(one[1:-1] for one in contents if one != EMPTY_PACK) + b"]"


def compact_json(value: bytes) -> bytes | None:
    """The same JSON without white space, or None if the value is not JSON."""
    return scan.compact_json(value, _DEPTH_MAX)


def portable_json(value: bytes) -> bytes:
    """A JSON value without white space.

    Raises ValueError if it has a number that some common parsers refuse. Readers would get such a
    value as text (`polybus.scan.packs_py`).
    """
    compact = scan.compact_json(value, len(value))
    if compact is None:
        raise ValueError("a number must fit into a double, and have at most 300 characters")
    return compact


def deeper_than(text: bytes, depth_max: int) -> bool:
    """Whether the brackets of a JSON text are nested deeper than `depth_max`."""
    if text.count(b"[") + text.count(b"{") <= depth_max:
        return False
    brackets = _STRING.sub(b"", text).translate(_SQUARE, _NO_BRACKETS)
    for _ in range(depth_max):
        # Each pass removes the innermost level, at the speed of a copy.
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def encode_packs(packs: Iterable[tuple[int, bytes]]) -> bytes:
    """Encode packs, which have ascending ids: `{"1":[…],"2":[…]}`."""
    return b"{" + b",".join([b'"%d":%b' % pack for pack in packs]) + b"}"


def encode_notice(kind: str, data: Any) -> bytes:
    """One message of pack "0", without the brackets of the pack."""
    return _json([kind, data])


def parse_pack(body: bytes, *, depth_max: int = _DEPTH_MAX) -> bytes:
    """Validate a posted pack, `[["type", data], …]`, and return it in compact form.

    Raises:
        PeerError: `msgstream.pack-invalid`; not final.
    """
    try:
        if deeper_than(body, depth_max):
            raise _bad_pack(f"nested over {depth_max} deep (json-depth-max)")
        body.decode()
        messages = _raw_messages.decode(body)
        if not 0 < len(messages) <= PACK_MESSAGES_MAX:
            raise _bad_pack(f"a pack has 1 to {PACK_MESSAGES_MAX} messages")
        for message in messages:
            if len(message) not in (1, 2):
                raise _bad_pack("a message has a type and at most one data item")
            _string.decode(message[0])
        return portable_json(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _bad_pack(str(error)) from error


def parse_confirm_ids(text: str) -> list[int]:
    """The ids in a list such as `1,2,3`; invalid ids and the 0 of notices are ignored."""
    ids = []
    for word in text.split(","):
        word = word.strip()
        if word.isascii() and word.isdecimal() and len(word) <= ID_DIGITS_MAX:
            number = int(word)
            if number:
                ids.append(number)
    return ids


def event_chunks(name: str) -> list[str]:
    """The names that a client emits for a dotted one, most specific first: a.b.c, a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _bad_pack(text: str) -> PeerError:
    return PeerError("msgstream.pack-invalid", f'not [["type", data], …]: {text}', final=False)
