"""A schema is proposed from messages, with counts of what it would send to quarantine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polybus.errors import UsageError
from polybus.lake.infer import Proposal, infer


def proposed(*values: Any, outliers_max: float = 0.01) -> Proposal:
    texts = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    return infer(texts, outliers_max=outliers_max)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], "BIGINT"),
        ([1, 2.5], "DOUBLE"),
        ([1, 1 << 70], "DOUBLE"),
        ([True], "BOOLEAN"),
        (["a"], "STRING"),
        (["2026-01-31T12:00:00Z", "2026-01-31 12:00"], "TIMESTAMP"),
        (["2026-01-31T12:00:00Z", "soon"], "STRING"),
        (["2026-13-31T12:00:00Z"], "STRING"),
        ([1, "a"], "VARIANT"),
        ([[1, None], []], "ARRAY<BIGINT>"),
        ([[1, "a"]], "ARRAY<STRING>"),
        ([{"x": 1}, {"y": [1.5]}], "STRUCT<x BIGINT, y ARRAY<DOUBLE>>"),
        ([{}], "VARIANT"),
        ([{"it's": 1}], "VARIANT"),
        ([[{"a b": None}]], "ARRAY<STRUCT<`a b` STRING>>"),
    ],
)
def test_a_field_gets_the_narrowest_type_of_its_values(values: list[Any], kind: str) -> None:
    found = proposed(*({"f": value} for value in values))
    assert found.schema == f"f {kind} NOT NULL"
    assert found.quarantined == {}


def test_a_field_that_some_lack_may_be_null() -> None:
    assert proposed({"a": 1, "b": 2}, {"a": 3}, {"a": 4, "b": None}).schema == (
        "a BIGINT NOT NULL, b BIGINT"
    )


def test_what_would_be_quarantined_is_counted_by_reason() -> None:
    outliers = [{"n": "x"}, {"n": "9" * 5000}]
    found = proposed(*[{"n": i} for i in range(96)], *outliers, b"{", [1], outliers_max=0.03)
    assert found.schema == "n BIGINT NOT NULL"
    assert found.quarantined == {"not JSON": 1, "not an object": 1, "n is not of type BIGINT": 2}
    assert (found.messages, found.fitting) == (100, 96)


def test_without_outliers_every_object_fits() -> None:
    found = proposed({"n": 1}, {"n": "x"}, outliers_max=0.0)
    assert found.schema == "n VARIANT NOT NULL" and found.fitting == 2


def test_fields_that_a_schema_cannot_have_are_named() -> None:
    found = proposed({"it's": 1, "a": 2})
    assert (found.schema, found.left_out) == ("a BIGINT NOT NULL", ["it's"])


def test_a_topic_without_objects_has_no_schema() -> None:
    with pytest.raises(UsageError, match=r"topic\.no-schema: none of the 2 messages"):
        proposed(b"text", 5)


def test_names_that_no_table_can_have_are_left_out() -> None:
    found = proposed({"A": 1, "a": 2, "_Message": 3, "b": {"x": 1, "X": 2}, "it's": 4})
    assert found.schema == "b VARIANT NOT NULL"
    assert found.left_out == ["A", "a", "_Message", "it's"]
