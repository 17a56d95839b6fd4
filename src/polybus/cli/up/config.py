"""The settings under which `polybus up` runs the bus, and those of its demo."""

from __future__ import annotations

from pathlib import Path

import msgspec

from polybus.config import Config, Connector, Pipeline, Topic

ORDERS = "demo.orders"
TELEMETRY = "demo.telemetry"
CHAT = "demo.chat"
READINGS = "demo.readings"
DEMO_TOPICS = (
    Topic(
        name=ORDERS,
        format="json",
        schema="id STRING, customer STRING, item STRING, quantity INT, amount DOUBLE, at TIMESTAMP",
        message_id="$.id",
        event_time="$.at",
    ),
    Topic(name=TELEMETRY),
    Topic(name=CHAT),
    Topic(name=READINGS),
)


def with_demo(config: Config) -> Config:
    """The settings with what the demo needs: its topics, a queue's port, impatient alerts."""
    declared = {topic.name for topic in config.topic_list()}
    connectors = list(config.connectors)
    if not any("queue" in one.protocols for one in connectors):
        connectors.append(Connector(port=0, speaks="queue", topic=READINGS))
    pipeline = config.pipeline
    if pipeline == Pipeline():
        # A visitor stays for minutes, not for days.
        pipeline = msgspec.structs.replace(
            pipeline, alert_history_s=30.0, alert_messages_min=60, alert_pause_s=60.0
        )
    return msgspec.structs.replace(
        config,
        connectors=connectors,
        topics=[*config.topics, *(one for one in DEMO_TOPICS if one.name not in declared)],
        pipeline=pipeline,
    )


def write(config: Config, path: Path) -> None:
    """The settings as a file for `polybus serve --config`."""
    # A topics file has been read into `topics`.
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, topic_config=None)))
