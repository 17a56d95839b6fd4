"""The recipes of docs/howto/pipelines.md: their code, over their messages, gives their output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner
from docs_kit import ROOT, run_by
from pipeline_kit import PipelineFolder
from spark_kit import running_bus

from polybus.cli.sql import sql
from polybus.lake import duck
from polybus.spark.views import collect

PAGE = ROOT / "docs" / "howto" / "pipelines.md"
LATER = "page_log"
"""The table that is added after the others have run."""
# What the page has shown before its expectations: the names of Spark, and a table to read.
BEFORE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
"""
PARSED = """
CREATE STREAMING TABLE orders_parsed AS
SELECT get_json_object(string(value), '$.item') AS customer, offset AS price, 'EUR' AS currency
FROM STREAM(`shop.orders`);
"""
BIG = '{"id": 9, "country": "CH", "amount": 2000}'
MORE = ['{"visitor": "eve", "page": "/"}', '{"visitor": "eve", "page": "/lamps"}']


class Recipes(NamedTuple):
    """What the page has: lines of topics, code by suffix, and commands with their output."""

    topics: dict[str, list[str]]
    code: dict[str, list[str]]
    outputs: dict[str, str]


def recipes() -> Recipes:
    text = PAGE.read_text().split("\n## Recipes\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^`(\S+)`:\n\n)?^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    topics: dict[str, list[str]] = {}
    code: dict[str, list[str]] = {}
    outputs: dict[str, str] = {}
    for topic, kind, body in blocks:
        if kind == "json":
            topics[topic] = body.splitlines()
        elif kind != "console":
            code.setdefault({"python": "py", "sql": "sql"}[kind], []).append(body)
        else:
            command, _, output = body.partition("\n")
            outputs[command.removeprefix("$ ")] = output
    return Recipes(topics, code, outputs)


def declarations() -> dict[str, str]:
    """The code above the recipes, each as a pipeline of its own."""
    blocks = run_by("spark/test_recipes.py", "docs/howto/pipelines.md")
    above = [one for one in blocks if one.section != "Recipes"]
    assert len(above) + sum(map(len, recipes().code.values())) == len(
        [one for one in blocks if one.kind != "console"]
    )
    code = {(one.section, one.kind): one.text for one in above}
    assert len(code) == len(above) == 4
    return {
        "declared.py": code["What you can declare", "python"],
        "spoken.sql": code["What you can declare", "sql"],
        "expected/clean.py": BEFORE + code["Expectations", "python"],
        "expected/parsed.sql": PARSED,
        "constrained/clean.sql": code["Expectations", "sql"],
        "constrained/parsed.sql": PARSED,
    }


def check_declarations(spark: Any, folder: PipelineFolder) -> None:
    """The first one runs; the others, of which tests/spark has more, are loaded and analysed."""
    for name, text in declarations().items():
        folder.write(name, text)
    folder.run("declared")
    assert folder.rows("declared.totals", "country", "amount") == [("CH", 2000), (None, None)]
    big = spark.read.format("polybus").options(subscribe="orders.big", data=folder.bus.data).load()
    assert [bytes(row.value) for row in big.collect()] == [b'{"id":9,"amount":2000}']
    analysed = folder.prepare("spoken", "expected", "constrained", check_only=True)
    assert analysed.problems == {} and len(analysed.flows) == 6


def check_engines(spark: Any, data: Path, query: str) -> None:
    """The query has the same rows on DuckDB and on Spark."""
    with duck.Engine(data) as engine:
        _, batches = engine.stream(query)
        found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    by_spark = collect(spark, query, data, rows_max=1000)
    assert list(zip(*(one.to_pylist() for one in by_spark.columns), strict=True)) == found, query


def test_every_recipe_gives_the_output_that_the_page_shows(spark: Any, tmp_path: Path) -> None:
    found = recipes()
    late = [text for text in found.code["sql"] if LATER in text]
    early = [text for text in found.code["sql"] if LATER not in text]
    with running_bus(tmp_path, [*found.topics, "orders.big"]) as bus:
        folder = PipelineFolder(spark, bus, tmp_path)
        for topic, lines in found.topics.items():
            bus.publish(topic, lines)
        bus.publish("shop.orders", [BIG])
        (folder.folder / "recipes").mkdir(parents=True)
        (folder.folder / "recipes" / "recipes.py").write_text("\n\n".join(found.code["py"]))
        (folder.folder / "recipes" / "recipes.sql").write_text("\n".join(early))
        folder.run()
        bus.publish("web.pages", MORE[:1])
        (folder.folder / "recipes" / "later.sql").write_text("\n".join(late))
        folder.run(refresh=[LATER])
        bus.publish("web.pages", MORE[1:])
        folder.run(refresh=[LATER])
        for command, output in found.outputs.items():
            arguments = [*shlex.split(command)[2:], "--data", str(bus.data)]
            result = CliRunner().invoke(sql, arguments)
            assert result.stdout == output, f"{command}\n{result.output}"
            check_engines(spark, bus.data, shlex.split(command)[2])
        # One table again, from the start, and no other.
        before = folder.rows("recipes.page_log", "offset")
        folder.run(refresh=[LATER], reset=[LATER])
        assert folder.rows("recipes.page_log", "offset") == before
        check_declarations(spark, folder)
