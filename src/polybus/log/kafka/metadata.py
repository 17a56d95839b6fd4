"""Metadata of topics: leader, replicas, and the id of each incarnation; deletion by id.

aiokafka has only older versions of these requests, without topic ids; so they are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

NO_ID = bytes(16)


class TopicIdType(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class TopicsResponseV12(Response):
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", TopicIdType),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TopicsRequestV12(RequestStruct):
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = TopicsResponseV12
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic_id", TopicIdType),
                ("name", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicsRequest(Request[TopicsRequestV12]):
    """Asks for some topics by name, or for all."""

    API_KEY = 3

    def __init__(self, names: list[str] | None) -> None:
        self._names = names

    def build(self, request_struct_class: type[TopicsRequestV12]) -> TopicsRequestV12:
        names: list[tuple[bytes, str, dict[int, bytes]]] | None = None
        if self._names is not None:
            names = [(NO_ID, name, {}) for name in self._names]
        return request_struct_class(names, False, False, {})


class DeleteResponseV6(Response):
    API_KEY = 20
    API_VERSION = 6
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("topic_id", TopicIdType),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DeleteRequestV6(RequestStruct):
    API_KEY = 20
    API_VERSION = 6
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = DeleteResponseV6
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("topic_id", TopicIdType),
                ("tags", TaggedFields),
            ),
        ),
        ("timeout_ms", Int32),
        ("tags", TaggedFields),
    )


class DeleteRequest(Request[DeleteRequestV6]):
    """Deletes the incarnation of a topic that has this id, not a later one of the same name."""

    API_KEY = 20

    def __init__(self, topic_id: bytes, timeout_ms: int) -> None:
        self._topic_id = topic_id
        self._timeout_ms = timeout_ms

    def build(self, request_struct_class: type[DeleteRequestV6]) -> DeleteRequestV6:
        return request_struct_class([(None, self._topic_id, {})], self._timeout_ms, {})


@dataclass(frozen=True, slots=True)
class PartitionState:
    """A topic's first partition: its leader (None while there is none) and its replicas.

    Topics of other programs may have more partitions than one.
    """

    topic_id: bytes
    leader: int | None
    insync: int
    replicas: int = 1
    partitions: int = 1


def states_of(answer: Any) -> dict[str, PartitionState]:
    """The topics that exist, by their Kafka name."""
    found = {}
    for error, name, topic_id, _, partitions, *_ in answer.topics:
        first = next((one for one in partitions if one[1] == 0), None)
        if error in (0, 5) and first is not None:
            _, _, leader, _, replicas, insync, *_ = first
            known = leader if leader >= 0 else None
            found[name] = PartitionState(
                topic_id, known, len(insync), len(replicas), len(partitions)
            )
    return found
