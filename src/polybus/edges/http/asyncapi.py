"""/asyncapi.json: the messages of all protocols except HTTP calls, as an AsyncAPI 3 document.

Generated from the settings: the connectors are its servers, their protocols its channels.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from polybus.config import Connector

TOPIC = {"topic": {"description": "The name of a topic, in lower case."}}
PAYLOADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "boson-frames": (
        "Boson frames",
        "A frame: flag, length and topic, length and content. `topic?receipt=ID` asks for a "
        "receipt; `$subscribe` and `$unsubscribe` are control frames.",
        {"type": "string", "format": "binary"},
    ),
    "boson-properties": (
        "Boson properties",
        "A message of properties: `hbfv` first, then `topic`, `content` and headers; `hbfr` asks "
        "for a receipt.",
        {"type": "string", "format": "binary"},
    ),
    "goms": (
        "goMS",
        "A JSON object per line; `register` before `send`.",
        {
            "type": "object",
            "required": ["messagetype"],
            "properties": {
                "messagetype": {
                    "enum": ["register", "send", "logout", "close", "login", "message", "error"]
                },
                "topics": {"type": "array", "items": {"type": "string"}},
                "data": {"description": "any JSON; bytes as base64 with `encoding`"},
                "headers": {"type": "object"},
                "ack": {"type": "boolean"},
                "from": {"type": "string"},
            },
        },
    ),
    "queue": (
        "Queue",
        "Four bytes of length, big-endian, then the message; the connector has one topic.",
        {"type": "string", "format": "binary"},
    ),
    "http": (
        "msgstream",
        "Packs of a session, from `/msgstream?sessionKey=KEY`; a client confirms them by their "
        "numbers. The calls of the API are in /openapi.json.",
        {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "array", "minItems": 1}},
        },
    ),
}


def describe_streams(connectors: Sequence[Connector], live: Sequence[str]) -> dict[str, Any]:
    """The document of a bus with these connectors; `live` are the channels of /v1/live."""
    spoken = sorted({one for connector in connectors for one in connector.protocols})
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for protocol in spoken:
        title, text, payload = PAYLOADS[protocol]
        # A message that the server sends is received by its client, and the other way round.
        channels[protocol] = {
            "title": title,
            "description": text,
            "address": "/msgstream" if protocol == "http" else "{topic}",
            "messages": {"message": {"payload": payload}},
            **({} if protocol == "http" else {"parameters": TOPIC}),
        }
        actions = ("send",) if protocol == "http" else ("send", "receive")
        for action in actions:
            name = f"{'deliver' if action == 'send' else 'publish'}-{protocol}"
            operations[name] = _operation(action, protocol)
    if "http" in spoken:
        names = {"type": "string", "enum": sorted(["tail", *live])}
        channels["live"] = {
            "title": "Live figures",
            "description": "The WebSocket of the console: subscribe to channels by an id.",
            "address": "/v1/live",
            "messages": {
                "message": {"payload": {"type": "object", "properties": {"channel": names}}}
            },
        }
        operations["live"] = _operation("send", "live")
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Polybus", "version": version("polybus")},
        "servers": {
            f"connector-{number}": {
                "host": f"{one.ip}:{one.port}",
                "protocol": one.protocol,
                "description": f"speaks {', '.join(one.protocols)}",
            }
            for number, one in enumerate(connectors)
        },
        "channels": channels,
        "operations": operations,
    }


def _operation(action: str, channel: str) -> dict[str, Any]:
    place = f"#/channels/{channel}"
    return {
        "action": action,
        "channel": {"$ref": place},
        "messages": [{"$ref": f"{place}/messages/message"}],
    }
