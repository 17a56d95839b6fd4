"""SQL of one engine as text for the other."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from polybus.errors import UsageError
from polybus.lake.sql.text import (
    description_in,
    version_in,
    with_descriptions_named,
    with_versions_named,
)


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("FROM silver VERSION AS OF 3", "FROM `silver@v3` AS `silver`"),
        ("FROM silver version as of 3 WHERE x", "FROM `silver@v3` AS `silver` WHERE x"),
        ("FROM silver VERSION AS OF 3 s JOIN t", "FROM `silver@v3` s JOIN t"),
        ("FROM a.b VERSION AS OF 3 AS s", "FROM `a.b@v3` AS s"),
        ("FROM \"a b\" TIMESTAMP AS OF '2026-01-31'", "FROM `a b@t2026-01-31` AS `a b`"),
        (
            "FROM t TIMESTAMP AS OF TIMESTAMP '2026-01-31 12:00'",
            "FROM `t@t2026-01-31 12:00` AS `t`",
        ),
        (
            "FROM t TIMESTAMP AS OF timestamp'2026-01-31 12:00'",
            "FROM `t@t2026-01-31 12:00` AS `t`",
        ),
        ("FROM silver FOR VERSION AS OF 3", "FROM `silver@v3` AS `silver`"),
        ("FROM silver FOR SYSTEM_VERSION AS OF '3' s", "FROM `silver@v3` s"),
        ("FROM silver SYSTEM_TIME AS OF '2026-01-31'", "FROM `silver@t2026-01-31` AS `silver`"),
        ("FROM tables.silver VERSION AS OF 3", "FROM `silver@v3` AS `silver`"),
        ("FROM t VERSION AS OF 3-- x", "FROM `t@v3` AS `t`-- x"),
        ("FROM t VERSION AS OF 3/* x */ JOIN u", "FROM `t@v3` AS `t`/* x */ JOIN u"),
        ("FROM t VERSION AS OF 3 |> WHERE x", "FROM `t@v3` AS `t` |> WHERE x"),
        ("(FROM t VERSION AS OF 3), u", "(FROM `t@v3` AS `t`), u"),
        ("FROM t VERSION AS OF 3 AS s(a)", "FROM `t@v3` AS s(a)"),
        ("FROM t VERSION AS OF 3 `s`", "FROM `t@v3` `s`"),
        ("SELECT 'it\\'s x VERSION AS OF 3'", None),
        ("SELECT 'x VERSION AS OF 3' -- x VERSION AS OF 3", None),
        ("SELECT version AS of3 FROM t", None),
    ],
)
def test_a_version_of_a_table_has_a_name(sql: str, named: str | None) -> None:
    assert with_versions_named(sql, "`") == (sql if named is None else named)


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("DESCRIBE HISTORY silver", "SELECT * FROM `silver@history`"),
        ("desc detail tables.a.b LIMIT 1", "SELECT * FROM `a.b@detail` LIMIT 1"),
        ('-- x\nDESCRIBE HISTORY "a b";', "-- x\nSELECT * FROM `a b@history`;"),
        (
            "SELECT n FROM (DESCRIBE HISTORY `a-b`) h",
            "SELECT n FROM (SELECT * FROM `a-b@history`) h",
        ),
        ("DESCRIBE history", None),
        ("SELECT 'DESCRIBE HISTORY silver' -- DESCRIBE HISTORY silver", None),
        ("SELECT a FROM t ORDER BY desc, history", None),
    ],
)
def test_a_description_of_a_table_is_a_query_of_a_name(sql: str, named: str | None) -> None:
    assert with_descriptions_named(sql, "`") == (sql if named is None else named)
    assert description_in("a.b@history") == ("a.b", "history")
    assert description_in("a.b@v1") == ("a.b@v1", "")


def test_text_between_dollars_is_left_alone() -> None:
    sql = "SELECT $$it's x VERSION AS OF 3$$, $t$ y VERSION AS OF 3 $$ $t$ FROM a$b$"
    named = with_versions_named(f"{sql} VERSION AS OF 3", '"')
    assert named == sql.removesuffix("a$b$") + '"a$b$@v3" AS "a$b$"'


def test_a_name_tells_the_version() -> None:
    assert version_in("silver") == ("silver", None)
    assert version_in("a.b@v12") == ("a.b", 12)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert version_in("a@t2026-01-31T12:00:00Z") == ("a", noon)
    assert version_in("a@t2026-01-31 12:00") == ("a", noon)
    with pytest.raises(UsageError, match=r"sql\.invalid: TIMESTAMP AS OF 'yesterday'"):
        version_in("a@tyesterday")


@pytest.mark.parametrize(
    "at",
    [
        *("TIMESTAMP AS OF now()", "TIMESTAMP AS OF 12", "VERSION AS OF 'x'"),
        *(
            "VERSION AS OF 3 + 1",
            "VERSION AS OF 3+1 s",
            "VERSION AS OF 3::int",
            "VERSION AS OF 3.5",
        ),
        *("VERSION AS OF 5 - (SELECT 1)", "VERSION AS OF '3' || '1'"),
        "TIMESTAMP AS OF '2026-01-31' - INTERVAL 1 DAY",
        "TIMESTAMP AS OF TIMESTAMP '2026-01-31' + INTERVAL '1' DAY",
        "TIMESTAMP AS OF '2026-01-31' || 'T12:00'",
        "TIMESTAMP AS OF '2026-01-31'::timestamp WHERE n = 1",
        "TIMESTAMP AS OF '2026-01-31' AT TIME ZONE 'UTC'",
    ],
)
def test_a_version_that_is_no_literal_says_what_to_write(at: str) -> None:
    with pytest.raises(UsageError, match=r"sql\.invalid: .* AS OF .*: write a"):
        with_versions_named(f"SELECT 1 FROM silver {at}", '"')
