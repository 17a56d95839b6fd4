"""`polybus bench --spark`: every contestant finds every message, and bars are judged right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polybus.bench.errors import BenchError
from polybus.bench.spark import reading
from polybus.bench.spark.corpus import TOPIC, write_corpus
from polybus.bench.spark.figures import Figure, bar_of, quantiles, shown, summary
from polybus.log.reading.reader import LogReader

MESSAGES = 25_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> reading.Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    journal, history = write_corpus(folder, MESSAGES, lambda count: None)
    return reading.Corpus(journal, history, MESSAGES)


def test_the_same_messages_are_in_the_journal_and_in_history(corpus: reading.Corpus) -> None:
    fresh, old = LogReader(corpus.journal), LogReader(corpus.history)
    assert fresh.history(TOPIC).handed_over == 0
    assert old.history(TOPIC).handed_over == MESSAGES
    ours = [batch.column("value") for batch in fresh.read(TOPIC, 0, MESSAGES)]
    theirs = [batch.column("value") for batch in old.read(TOPIC, 0, MESSAGES)]
    assert [one for part in ours for one in part] == [one for part in theirs for one in part]


def test_every_way_of_reading_finds_every_message(
    spark: Any, corpus: reading.Corpus, tmp_path: Path
) -> None:
    told: list[str] = []
    figures = reading.measure_reading(spark, corpus, tmp_path, rounds=1, tell=told.append)
    held = [(figure.work, figure.who) for figure in figures if figure.met is not None]
    assert held == [
        ("read all columns", "our source, journal"),
        ("read all columns", "our source, history"),
        ("copy to Parquet (zstd)", "our source, journal"),
        ("SQL over one topic", "polybus sql, history"),
        ("SQL over one topic", "polybus sql, journal"),
    ]
    assert all(figure.value > 0 for figure in figures)
    assert len(told) == 2 * len(figures)


def test_a_way_that_misses_messages_is_an_error(
    spark: Any, corpus: reading.Corpus, tmp_path: Path
) -> None:
    wrong = reading.Corpus(corpus.journal, corpus.history, MESSAGES + 1)
    with pytest.raises(BenchError, match=f"{MESSAGES} rows of {MESSAGES + 1}"):
        reading.measure_reading(spark, wrong, tmp_path, rounds=1, tell=lambda text: None)


def figure(**changes: Any) -> Figure:
    fields: dict[str, Any] = {"work": "w", "who": "we", "value": 10.0, "unit": "ms"}
    return Figure(**(fields | changes))


def test_a_bar_is_held_against_the_ratio_if_there_is_one() -> None:
    assert figure().met is None
    assert figure(at_most=10.0).met is True
    assert figure(at_most=9.0).met is False
    assert figure(ratio=1.1, at_most=1.2).met is True
    assert figure(ratio=1.3, at_most=1.2).met is False
    assert figure(unit="rows/s", ratio=0.4, at_least=0.5).met is False


def test_the_summary_names_what_was_missed() -> None:
    missed = figure(work="copy", ratio=1.3, at_most=1.2, unit="s")
    assert summary([figure(at_most=11.0), missed]) == (
        "1 of 2 bars met.\nNot met: copy, we: 10.00 s, 1.30 ×; the bar is ≤ 1.2 ×."
    )
    assert shown(figure(p99=20.0)) == "10 ms, p99 20"
    assert shown(figure(unit="rows/s", value=2.5e6)) == "2.50 M/s"
    assert bar_of(figure(at_least=3.0)) == "≥ 3 ms"
    assert quantiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
