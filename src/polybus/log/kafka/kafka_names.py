"""The names of Polybus topics in Kafka.

Kafka takes letters, digits, `.`, `_` and `-`. Names of Polybus topics are in lower case, so a
capital X begins an escape: `XHH` is the byte HH. `orders` stays `orders`; `$events` is
`X24events`. A capital letter elsewhere marks what is not a topic (`Polybus-topics`).
"""

import re

from polybus.errors import UsageError

REGISTRY = "Polybus-topics"
NAME_BYTES_MAX = 249
_PLAIN = re.compile(r"[a-z0-9._-]")


def kafka_name(topic: str, prefix: str = "") -> str:
    """The name in Kafka. Raises UsageError `topic.invalid` if it is too long for Kafka."""
    name = "".join(
        char
        if _PLAIN.fullmatch(char)
        else "".join(f"X{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        for char in topic
    )
    if name in (".", ".."):
        name = name.replace(".", "X2E")
    name = prefix + name
    if len(name) > NAME_BYTES_MAX:
        text = f"the topic's name in Kafka would be over {NAME_BYTES_MAX} bytes; choose another"
        raise UsageError("topic.invalid", text)
    return name
