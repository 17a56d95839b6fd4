"""A broken pipeline is reported with file and line before anything starts; others start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pipeline_kit import PASS_TIMEOUT_S, PipelineFolder
from spark_kit import RunningBus, running_bus

from polybus.lake.table import open_table

HEAD = """from pyspark import pipelines as dp
from pyspark.sql import functions as F

"""
GOOD = f"""{HEAD}
@dp.materialized_view
def numbers():
    return spark.range(3)
"""


@pytest.fixture(scope="module")
def shared_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    with running_bus(tmp_path_factory.mktemp("bus"), ["orders", "other.orders"]) as bus:
        yield bus


@pytest.fixture
def pipelines(spark: Any, shared_bus: RunningBus, tmp_path: Path) -> PipelineFolder:
    return PipelineFolder(spark, shared_bus, tmp_path)


# What the file says, the line that is wrong, and words of the error.
BROKEN = {
    "syntax": ("def broken(:\n    pass\n", 4, "pipeline.file"),
    "exception": ("x = 1\nraise ValueError('no luck')\n", 5, "ValueError: no luck"),
    "decorator": ("@dp.table(name=5)\ndef t():\n    pass\n", 4, "`name`"),
    "duplicate": (
        "@dp.materialized_view\ndef a():\n    return spark.range(1)\n\n"
        "@dp.materialized_view(name='a')\ndef b():\n    return spark.range(1)\n",
        8,
        "named a already exists, at",
    ),
    "unknown input": (
        "@dp.table\ndef t():\n    x = 1\n    return spark.readStream.table('nowhere')\n",
        7,
        "pipeline.unknown-input",
    ),
    "unknown input in SQL": (
        "@dp.materialized_view\ndef t():\n    return spark.sql('SELECT * FROM nowhere')\n",
        6,
        "or topic is named nowhere",
    ),
    "unknown column": (
        "@dp.table\ndef t():\n    rows = spark.readStream.table('orders')\n"
        "    return rows.select('colour')\n",
        7,
        "`colour` cannot be resolved",
    ),
    "cycle": (
        "@dp.materialized_view\ndef a():\n    return spark.read.table('b')\n\n"
        "@dp.materialized_view\ndef b():\n    return spark.read.table('a')\n",
        4,
        "a depends on itself: a → b → a",
    ),
    "no data frame": (
        "@dp.table\ndef t():\n    return 5\n",
        4,
        "returns int; it must return a DataFrame",
    ),
    "batch into a table": (
        "@dp.table\ndef t():\n    return spark.range(3)\n",
        4,
        "t writes to t, which takes a stream",
    ),
    "stream into a view": (
        "@dp.materialized_view\ndef t():\n    return spark.readStream.table('orders')\n",
        4,
        "t is a materialized view, and its query is a stream",
    ),
    "no watermark": (
        "@dp.table\ndef t():\n"
        "    return spark.readStream.table('orders').groupBy('sender').count()\n",
        4,
        "without watermark",
    ),
    "no output": (
        "@dp.append_flow(target='away')\ndef f():\n    return spark.readStream.table('orders')\n",
        4,
        "pipeline.unknown-output",
    ),
    "no flow": ("dp.create_streaming_table('t')\n", 4, "no flow writes to table t"),
    "name": ("@dp.table(name='a b')\ndef t():\n    pass\n", 4, "'a b' is not a valid name"),
    "format": ("@dp.table(format='orc')\ndef t():\n    pass\n", 4, "format orc is not supported"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_in_python_is_reported_with_its_line(pipelines: PipelineFolder, case: str) -> None:
    body, line, words = BROKEN[case]
    path = pipelines.write("bad.py", HEAD + body)
    text = pipelines.problem()
    assert f"{path}:{line}: " in text
    assert words in text
    assert "\n" not in text and "org.apache" not in text


TABLE_STREAMS = {
    "rows that change": (
        "'traffic'",
        "the rows of traffic change, so it cannot be read as a stream",
    ),
    "unknown": ("'gold'", "no dataset of the pipeline, lake table or topic is named gold"),
    "itself": ("'bad.t'", "t depends on itself: t → t"),
}


@pytest.mark.parametrize("case", TABLE_STREAMS)
def test_a_stream_of_a_table_that_cannot_be_one_is_reported(
    pipelines: PipelineFolder, case: str
) -> None:
    traffic = open_table(pipelines.bus.data, "traffic", is_fed=True)
    traffic.append(pa.table({"n": [1]}), writer="w", batch_id=0)
    name, words = TABLE_STREAMS[case]
    body = f"@dp.table\ndef t():\n    return spark.readStream.table({name})\n"
    path = pipelines.write("bad.py", HEAD + body)
    text = pipelines.problem()
    assert f"{path}:6: " in text or case == "itself"
    assert words in text


SQL = {
    "syntax": ("CREATE STREAMING TABLE a;\n\nCREATE STREAMING\nTABEL b", 4, "TABEL"),
    "other statement": ("-- a row\nINSERT INTO a VALUES (1)", 2, "does not declare an element"),
    "unknown column": (
        "CREATE STREAMING TABLE a AS\nSELECT offset,\n  colour\nFROM STREAM(orders)",
        3,
        "`colour` cannot be resolved",
    ),
    "unknown name": (
        "CREATE MATERIALIZED VIEW a AS\nSELECT * FROM nowhere",
        1,
        "or topic is named nowhere",
    ),
    "dots": (
        "CREATE STREAMING TABLE a AS\nSELECT * FROM STREAM(`other.orders`);\n"
        "CREATE MATERIALIZED VIEW b AS SELECT * FROM other.orders",
        3,
        "needs backticks in SQL",
    ),
}


@pytest.mark.parametrize("case", SQL)
def test_an_error_in_sql_is_reported_with_its_line(pipelines: PipelineFolder, case: str) -> None:
    body, line, words = SQL[case]
    path = pipelines.write("bad.sql", body)
    text = pipelines.problem()
    assert f"{path}:{line}: " in text
    assert words in text


def test_a_flow_that_fails_in_a_batch_says_which_one_why_and_what_to_do(
    pipelines: PipelineFolder, shared_bus: RunningBus
) -> None:
    """An error of Java in `foreachBatch` has a stack trace that is too long for Spark itself."""
    shared_bus.publish("orders", ["good", "poison"])
    pipelines.write(
        "shop.py",
        f"{HEAD}\n@dp.table\ndef checked():\n"
        "    rows = spark.readStream.table('orders')\n"
        "    text = F.col('value').cast('string')\n"
        "    wrong = F.raise_error(F.concat(F.lit('no order: '), text))\n"
        "    return rows.select(F.when(text == 'poison', wrong).otherwise(text).alias('v'))\n",
    )
    runner = pipelines.start(pipelines.prepare(), continuous=False)
    assert runner.wait(PASS_TIMEOUT_S)
    (failed,) = runner.failures
    assert (failed.pipeline, failed.flow) == ("shop", "checked")
    text = failed.error or ""
    assert text.startswith("batch 0: ") and "no order: poison" in text
    assert text.endswith("restart the pipeline: it continues with this batch")
    assert "\n" not in text and "org.apache" not in text and len(text) < 300


def test_a_broken_pipeline_does_not_stop_others(pipelines: PipelineFolder) -> None:
    pipelines.write("bad.py", "1 +")
    pipelines.write("good.py", GOOD)
    prepared = pipelines.prepare()
    assert list(prepared.problems) == ["bad"]
    assert [flow.full_name for flow in prepared.flows] == ["good.numbers"]


def test_a_spark_pipeline_spec_selects_files_and_settings(pipelines: PipelineFolder) -> None:
    pipelines.write(
        "shop/spark-pipeline.yml",
        """
        name: shop
        storage: file:///tmp/unused
        configuration: {spark.sql.session.timeZone: Asia/Tokyo}
        libraries:
          - glob: {include: transformations/**}
        """,
    )
    pipelines.write("shop/notes.py", "raise RuntimeError('not part of the pipeline')")
    pipelines.write(
        "shop/transformations/zone.py",
        f"{HEAD}\n@dp.materialized_view\ndef zone():\n"
        "    return spark.sql('SELECT current_timezone() z')",
    )
    pipelines.run()
    assert pipelines.rows("shop.zone", "z") == [("Asia/Tokyo",)]
