"""Retention removes whole files from the oldest on, never what somebody still needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from segments_kit import DAY_US, NOON_US, history_of, make_segment, make_topic, rows_batch

from polybus.config import Retention
from polybus.errors import UsageError
from polybus.log.history import manifest as manifests
from polybus.log.history import retention
from polybus.log.history.handover import hand_over
from polybus.log.history.manifest import HistoryLock
from polybus.log.interface import TopicSettings

NOW_US = NOON_US + 4 * DAY_US
DAY_S = 86_400.0


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """`news`: five days, ten messages each, the last one now. Returns its folder."""
    folder = make_topic(tmp_path, "news")
    commits = [
        [rows_batch("news", n * 10, 10, timestamp_us=NOON_US + n * DAY_US)] for n in range(5)
    ]
    make_segment(tmp_path, 1, commits)
    hand_over(tmp_path)
    return folder


def apply(data: Path, defaults: Retention, held: int | None = None) -> list[str]:
    return retention.apply(
        data, {"news": TopicSettings()}, defaults, now_us=NOW_US, held_from=lambda topic: held
    )


def file_bytes(folder: Path) -> list[int]:
    found = manifests.load(folder)
    assert found is not None
    return [file.bytes for file in found.files]


@pytest.mark.usefixtures("news")
def test_without_limits_nothing_goes(tmp_path: Path) -> None:
    assert apply(tmp_path, Retention()) == []
    assert history_of(tmp_path, "news").start == 0


@pytest.mark.usefixtures("news")
@pytest.mark.parametrize("age_s", [1e10, 1.7e308])
def test_nothing_is_older_than_forever(tmp_path: Path, age_s: float) -> None:
    assert apply(tmp_path, Retention(age_s=age_s)) == []
    assert history_of(tmp_path, "news").start == 0


def test_files_whose_last_message_is_too_old_go(tmp_path: Path, news: Path) -> None:
    assert apply(tmp_path, Retention(age_s=1.5 * DAY_S)) == ["news"]
    history = history_of(tmp_path, "news")
    assert (history.start, history.handed_over) == (30, 50)
    assert sorted(path.name for path in news.glob("history/*")) == [
        "date=2024-10-07",
        "date=2024-10-08",
    ]
    with pytest.raises(UsageError, match=r"log\.offset-unknown"):
        history.read(29, bytes_max=1)
    assert apply(tmp_path, Retention(age_s=1.5 * DAY_S)) == []


def test_all_of_a_silent_topic_goes_and_its_offsets_go_on(tmp_path: Path, news: Path) -> None:
    retention.retain(news, Retention(age_s=1), now_us=NOW_US + DAY_US)
    history = history_of(tmp_path, "news")
    assert (history.start, history.handed_over) == (50, 50)
    make_segment(tmp_path, 6, [[rows_batch("news", 50, 5, timestamp_us=NOW_US)]])
    hand_over(tmp_path)
    history = history_of(tmp_path, "news")
    assert (history.start, history.handed_over) == (50, 55)


def test_the_oldest_files_go_until_the_rest_is_small_enough(tmp_path: Path, news: Path) -> None:
    sizes = file_bytes(news)
    assert apply(tmp_path, Retention(bytes=sizes[-1] + sizes[-2])) == ["news"]
    assert history_of(tmp_path, "news").start == 30
    assert len(list(news.glob("history/**/*.parquet"))) == 2


def test_the_newest_file_does_not_go_for_its_size(tmp_path: Path, news: Path) -> None:
    apply(tmp_path, Retention(bytes=1))
    assert history_of(tmp_path, "news").start == 40


@pytest.mark.usefixtures("news")
@pytest.mark.parametrize(("held", "start"), [(0, 0), (19, 10), (20, 20), (1000, 40)])
def test_what_a_consumer_still_needs_stays(tmp_path: Path, held: int, start: int) -> None:
    apply(tmp_path, Retention(bytes=1), held)
    assert history_of(tmp_path, "news").start == start


@pytest.mark.usefixtures("news")
def test_a_topic_s_own_limits_come_before_the_bus_s(tmp_path: Path) -> None:
    make_topic(tmp_path, "other")
    settings = {"news": TopicSettings(retention_age_s=2.5 * DAY_S), "other": TopicSettings()}
    defaults = Retention(age_s=DAY_S / 2)
    assert retention.apply(tmp_path, settings, defaults, now_us=NOW_US) == ["news"]
    assert history_of(tmp_path, "news").start == 20


def test_a_damaged_topic_keeps_what_it_has_and_others_go_on(tmp_path: Path, news: Path) -> None:
    broken = make_topic(tmp_path, "broken")
    (broken / "manifest.json").write_text("{")
    settings = {"broken": TopicSettings(), "news": TopicSettings()}
    assert retention.apply(tmp_path, settings, Retention(bytes=1), now_us=NOW_US) == ["news"]
    assert (broken / "manifest.json").read_text() == "{"


@pytest.mark.usefixtures("news")
def test_while_a_hand_over_works_nothing_is_removed(tmp_path: Path) -> None:
    with HistoryLock(tmp_path):
        assert apply(tmp_path, Retention(bytes=1)) == []
    assert history_of(tmp_path, "news").start == 0


def test_files_are_made_small_enough_for_the_limit_to_work(tmp_path: Path) -> None:
    """A slow topic's messages of a day would otherwise be one file, kept or removed as a whole."""
    make_topic(tmp_path, "news")
    for number in range(20):
        make_segment(tmp_path, number + 1, [[rows_batch("news", number * 10, 10)]])
        hand_over(tmp_path, retention_bytes=12_000)
        apply(tmp_path, Retention(bytes=12_000))
    history = history_of(tmp_path, "news")
    assert 0 < history.start < 200
    assert len(history.manifest.files) > 1
    assert history.manifest.bytes <= 12_000
