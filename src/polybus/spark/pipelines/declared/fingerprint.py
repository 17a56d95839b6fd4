"""What of a flow its checkpoint depends on, kept beside the checkpoint.

A changed query may go on from an old checkpoint only if its sources, its state and its output are
the same. Spark finds out late, or not at all: a flow that reads another topic would take the old
topic's offsets for its own. So a flow's fingerprint is compared before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polybus.log.disk import OsDisk, replace_file
from polybus.spark.checkpoint import Checkpoint

FILE = "flow.json"
# Options that choose what is read. Others (rates, places, names) may change at any time.
_CHOOSING = ("subscribe", "subscribepattern", "assign", "path", "columns", "includeheaders")
_STATEFUL = (
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
    "TransformWithStateInPySpark",
    "GlobalLimit",
)
_EXPRESSION_IDS = re.compile(r"#\d+L?|-T\d+ms|\bplan_id=\d+")
_STRING_FIELDS_MAX = 1000


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The sources, the stateful operators, the output and its columns of a flow."""

    flow: str
    target: str
    sources: tuple[str, ...]
    state: tuple[str, ...]
    columns: dict[str, str]
    partition_by: tuple[str, ...] = ()


def fingerprint(
    flow: str, target: str, frame: Any, partition_by: Sequence[str] = ()
) -> Fingerprint:
    """The fingerprint of a stream that was analysed but not started."""
    sources: list[str] = []
    state: list[str] = []
    plan = getattr(frame, "_jdf", None)
    if plan is not None:  # Spark Connect keeps its plans on the server
        _walk(plan.queryExecution().analyzed(), sources, state)
    columns = {field.name: field.dataType.simpleString() for field in frame.schema}
    return Fingerprint(
        flow=flow,
        target=target,
        sources=tuple(sources),
        state=tuple(state),
        columns=columns,
        partition_by=tuple(partition_by),
    )


def _walk(node: Any, sources: list[str], state: list[str]) -> None:
    if not node.isStreaming():
        return
    name = node.nodeName()
    children = _sequence(node.children())
    if name.startswith("StreamingRelation"):
        sources.append(_source(node))
    joins_streams = name == "Join" and all(child.isStreaming() for child in children)
    if name in _STATEFUL or joins_streams:
        state.append(_EXPRESSION_IDS.sub("", node.simpleString(_STRING_FIELDS_MAX)).lstrip("~'"))
    for child in children:
        _walk(child, sources, state)


def _source(node: Any) -> str:
    """`polybus subscribe=orders`: the format, and the options that choose what is read."""
    if node.getClass().getSimpleName() == "StreamingRelation":
        options = node.dataSource().options()
        chosen = [(key, options.get(key).get()) for key in _CHOOSING if options.contains(key)]
    else:
        mapping = node.extraOptions()
        chosen = [(key, mapping.get(key)) for key in _CHOOSING if mapping.containsKey(key)]
    shown = [f"{key}={_sorted_names(key, value)}" for key, value in chosen]
    return " ".join([str(node.sourceName()), *shown])


def _sorted_names(key: str, value: str) -> str:
    if key != "subscribe":
        return value
    return ",".join(sorted(part.strip().lower() for part in value.split(",")))


def _sequence(scala: Any) -> list[Any]:
    return [scala.apply(index) for index in range(scala.size())]


def differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Why a flow cannot go on from the checkpoint of its old self; empty if it can."""
    found = []
    if old.target != new.target:
        found.append(f"it wrote to {old.target} and now writes to {new.target}")
    if old.sources != new.sources:
        found.append(f"it read {_listed(old.sources)} and now reads {_listed(new.sources)}")
    if old.state != new.state:
        found.append(f"its state was for {_listed(old.state)} and is now for {_listed(new.state)}")
    if old.partition_by != new.partition_by:
        was, now = _listed(old.partition_by), _listed(new.partition_by)
        found.append(f"its table was partitioned by {was} and now is by {now}")
    for name, kind in old.columns.items():
        if name in new.columns and new.columns[name] != kind:
            found.append(f"column {name} was {kind} and now is {new.columns[name]}")
    return found


def _listed(items: tuple[str, ...]) -> str:
    return "; ".join(item if len(item) <= 200 else f"{item[:200]}…" for item in items) or "nothing"


def kept(checkpoint: Path) -> Fingerprint | None:
    """What a checkpoint was made with; None if no batch was ever begun with it."""
    try:
        made = msgspec.json.decode((checkpoint / FILE).read_bytes(), type=Fingerprint)
        return made if Checkpoint(checkpoint).has_batches() else None
    except (OSError, msgspec.DecodeError):
        return None


def write(checkpoint: Path, made: Fingerprint) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)
    replace_file(checkpoint / FILE, msgspec.json.encode(made), OsDisk())
