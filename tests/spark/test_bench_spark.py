"""`polybus bench --spark`: every contestant finds every message, and bars are judged right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polybus.bench import BenchError
from polybus.bench.report import BenchFigure, Target, quantiles, summary
from polybus.bench.spark import planning, reading
from polybus.bench.spark.reading import TOPIC, Corpus, write_corpus
from polybus.log.reading.reader import LogReader

MESSAGES = 25_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"), MESSAGES, lambda text: None)


def test_the_same_messages_are_in_the_journal_and_in_history(corpus: Corpus) -> None:
    fresh, old = LogReader(corpus.journal), LogReader(corpus.history)
    assert fresh.history(TOPIC).handed_over == 0
    assert old.history(TOPIC).handed_over == MESSAGES
    ours = [batch.column("value") for batch in fresh.read(TOPIC, 0, MESSAGES)]
    theirs = [batch.column("value") for batch in old.read(TOPIC, 0, MESSAGES)]
    assert [one for part in ours for one in part] == [one for part in theirs for one in part]


def test_every_way_of_reading_finds_every_message(spark: Any, corpus: Corpus) -> None:
    told: list[str] = []
    figures = reading.measure_reading(spark, corpus, rounds=1, tell=told.append)
    judged = [
        (ours.work, ours.who, peer.who)
        for ours, peer in zip(figures[::2], figures[1::2], strict=True)
        if peer.met is not None
    ]
    native = "Spark's Parquet reader, history"
    assert judged == [
        ("read all columns", "our source, journal", native),
        ("read all columns", "our source, history", native),
        ("copy to Parquet (zstd)", "our source, journal", native),
        ("SQL over one topic", "polybus sql, history", "DuckDB alone, history"),
        ("SQL over one topic", "polybus sql, journal", "DuckDB alone, journal"),
    ]
    assert all(figure.value and figure.value > 0 for figure in figures)
    assert len(told) == 2 * len(figures)


def test_a_way_that_misses_messages_is_an_error(spark: Any, corpus: Corpus) -> None:
    wrong = replace(corpus, messages=MESSAGES + 1)
    with pytest.raises(BenchError, match=f"{MESSAGES} rows of {MESSAGES + 1}"):
        reading.measure_reading(spark, wrong, rounds=1, tell=lambda text: None)


def test_planning_is_measured_for_each_number_of_topics_and_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "TOPICS", (1, 20))
    monkeypatch.setattr(planning, "BATCHES", 2)
    monkeypatch.setattr(planning, "TABLE_FILES", 30)
    figures = planning.measure_planning(tmp_path, lambda text: None)
    assert [(one.work, one.who) for one in figures] == [
        *(
            (work, who)
            for work in (planning.LOOK, planning.PLAN, planning.REPORT)
            for who in ("1 topic", "20 topics", "100,000,000 messages of history")
        ),
        (planning.COMMIT, "a new table"),
        (planning.COMMIT, "100,000,000 rows"),
    ]
    assert LogReader(tmp_path / "history").bounds("t0").stop > planning.HISTORY
    assert all(one.value and one.value > 0 for one in figures)


def figure(**changes: Any) -> BenchFigure:
    fields: dict[str, Any] = {"work": "w", "who": "peer", "value": 10.0, "unit": "ms"}
    return BenchFigure(**(fields | changes))


def test_a_target_is_for_the_ratio_unless_it_is_absolute() -> None:
    assert figure().met is None
    assert figure(target=Target(value=10.0, absolute=True)).met is True
    assert figure(target=Target(value=9.0, absolute=True)).met is False
    both = Target(value=10.0, absolute=True, p99_max=20.0)
    assert [figure(p99=p99, target=both).met for p99 in (20.0, 21.0)] == [True, False]
    assert both.shown("ms") == "≤ 10 ms, p99 ≤ 20 ms"
    assert figure(ratio=1.1, target=Target(value=1.2)).met is True
    assert figure(ratio=1.3, target=Target(value=1.2)).met is False
    assert figure(ratio=0.4, target=Target(value=0.5, at_least=True)).met is False


def test_the_summary_names_what_was_missed() -> None:
    met = figure(target=Target(value=11.0, absolute=True))
    late = figure(target=Target(value=9.0, absolute=True))
    slow = figure(work="copy", ratio=1.3, target=Target(value=1.2), unit="s")
    assert summary([met, slow, late]) == [
        "1 of 3 targets met.",
        "Not met: copy: 1.30 × peer, the target is ≤ 1.2 ×.",
        "Not met: w: peer: 10 ms, the target is ≤ 9 ms.",
    ]
    assert figure(p99=20.0).shown == "10 ms, p99 20"
    assert figure(unit="rows/s", value=2.5e6).shown == "2.50 M/s"
    assert quantiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
