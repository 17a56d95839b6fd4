"""The options of the source: names and meanings as in Kafka, and a clear error for each mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_kit import NOON_US

from polybus.errors import UsageError
from polybus.spark.option_values import EARLIEST, LATEST, LOCATION, options_of
from polybus.spark.source import PolybusDataSource
from polybus.spark.source.options import COLUMNS, SourceOptions, parse

LOOKED_UP = """
import sys
import pyspark.sql.worker.lookup_data_sources, pyspark.sql.worker.create_data_source
import pyspark_polybus
assert not [name for name in sys.modules if name.startswith("polybus.spark.source.")]
print(pyspark_polybus.DefaultSource({"subscribe": "news", "columns": "offset"}).schema().names)
assert "pyarrow" not in sys.modules
"""
KIND = {"batch": False, "stream": True}


def parsed(kind: str = "batch", **given: str) -> SourceOptions:
    return parse({"data": "/data", "subscribe": "news"} | given, streaming=KIND[kind])


def refusal(kind: str = "batch", **given: str | None) -> UsageError:
    options: dict[str, Any] = {"data": "/data", "subscribe": "news"} | given
    with pytest.raises(UsageError) as caught:
        parse({k: v for k, v in options.items() if v is not None}, streaming=KIND[kind])
    return caught.value


def test_defaults_are_those_of_kafka_but_headers_are_included() -> None:
    batch, stream = parsed("batch"), parsed("stream")
    assert batch.starting.of("news") == EARLIEST
    assert stream.starting.of("news") == LATEST
    assert batch.ending.of("news") == LATEST
    assert batch.fail_on_data_loss
    assert batch.headers
    assert batch.columns == COLUMNS
    assert stream.max_delay_ms == 15 * 60 * 1000


def test_option_names_are_case_insensitive() -> None:
    found = parsed(STARTINGOFFSETS="earliest", failondataloss="FALSE", groupid="g")
    assert not found.fail_on_data_loss
    assert found.group == "g"


def test_a_list_of_topics_is_split_and_lowercased() -> None:
    assert parsed(subscribe=" News , sport,news,").topics == ("news", "sport")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", EARLIEST),
        ('{"news": {"0": 23}}', 23),
        ('{"news": {"0": -2}}', EARLIEST),
        ('{"News": 7}', 7),
        ('{"news": "earliest"}', EARLIEST),
    ],
)
def test_starting_offsets_are_words_or_json_as_in_kafka(text: str, expected: int) -> None:
    assert parsed(startingOffsets=text).starting.of("news") == expected


def test_a_topic_that_json_does_not_name_begins_at_the_default() -> None:
    options = parsed("stream", subscribe="news,sport", startingOffsets='{"news": 4}')
    assert options.starting.of("sport") == LATEST


@pytest.mark.parametrize(
    "text", ["1728043200000", "2024-10-04T12:00:00Z", "2024-10-04T14:00+02:00"]
)
def test_a_time_is_milliseconds_or_iso_8601_with_a_time_zone(text: str) -> None:
    assert parsed(startingTimestamp=text).starting_us == NOON_US


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("500ms", 500), ("30s", 30_000), ("15m", 900_000), ("250", 250)]
)
def test_a_duration_has_a_unit(text: str, expected_ms: int) -> None:
    found = parsed("stream", minOffsetsPerTrigger="5", maxTriggerDelay=text)
    assert found.max_delay_ms == expected_ms


def test_columns_keep_the_order_of_the_schema() -> None:
    assert parsed(columns="value, Topic ,offset").columns == ("topic", "offset", "value")


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("batch", {"subscribePattern": "n.*"}),
        ("batch", {"startingOffsets": "earliest", "startingTimestamp": "1"}),
        ("batch", {"endingOffsets": "latest", "endingTimestamp": "1"}),
        ("batch", {"url": "http://127.0.0.1:1"}),
        ("stream", {"endingOffsets": "latest"}),
        ("stream", {"endingTimestamp": "1"}),
        ("batch", {"maxOffsetsPerTrigger": "5"}),
        ("batch", {"minOffsetsPerTrigger": "5"}),
        ("batch", {"leaveOut": '["news"]'}),
        ("stream", {"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}),
        ("stream", {"maxTriggerDelay": "5s"}),
        ("batch", {"startingOffsets": '{"sport": 1}'}),
        ("batch", {"endingOffsets": '{"sport": {"0": 1}}'}),
    ],
)
def test_options_that_contradict_each_other_are_named(kind: str, given: dict[str, str]) -> None:
    error = refusal(kind, **given)
    assert error.code == "spark.option-conflict"
    for name in given:
        assert name in error.text


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": "sometimes"},
        {"startingOffsets": '{"news": {"1": 5}}'},
        {"startingOffsets": '{"news": -3}'},
        {"startingOffsets": '{"news": true}'},
        {"startingOffsets": "latest"},
        {"endingOffsets": "earliest"},
        {"startingTimestamp": "yesterday"},
        {"endingTimestamp": "2024-10-04T12:00:00"},
        {"startingOffsetsByTimestampStrategy": "never"},
        {"minPartitions": "0"},
        {"maxRecordsPerPartition": "-1"},
        {"failOnDataLoss": "maybe"},
        {"includeHeaders": "1"},
        {"columns": "value,nothing"},
        {"columns": " , "},
        {"maxValueBytes": "much"},
    ],
)
def test_an_invalid_value_names_its_option(given: dict[str, str]) -> None:
    error = refusal("batch", **given)
    assert error.code == "spark.option-invalid"
    assert f"option {next(iter(given))}:" in error.text


@pytest.mark.parametrize(("wrong", "code"), [("minPartitions", "invalid"), ("topics", "unknown")])
def test_a_mistake_is_reported_when_spark_asks_for_the_schema(wrong: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        PolybusDataSource({"subscribe": "news", wrong: "0"}).schema()
    assert caught.value.code == f"spark.option-{code}"


@pytest.mark.parametrize("text", ["news", '{"news": 1}', "[1]"])
def test_topics_to_leave_out_must_be_a_json_list(text: str) -> None:
    error = refusal("stream", leaveOut=text)
    assert error.code == "spark.option-invalid"
    assert "option leaveOut: it must be a JSON list of topics" in error.text


def test_an_invalid_pattern_names_its_option() -> None:
    error = refusal(subscribe=None, subscribePattern="(")
    assert error.code == "spark.option-invalid"
    assert "subscribePattern" in error.text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("startingOfsets", "startingOffsets"), ("subscribepatern", "subscribePattern")],
)
def test_an_unknown_option_suggests_the_nearest(wrong: str, right: str) -> None:
    error = refusal(**{wrong: "x"})
    assert error.code == "spark.option-unknown"
    assert f"option {wrong} is unknown; did you mean {right}?" in error.text


def test_the_option_path_is_answered_with_the_option_data() -> None:
    assert "option data" in refusal(path="/data").text


def test_no_selected_topic_is_a_missing_option() -> None:
    error = refusal(subscribe=None)
    assert error.code == "spark.option-missing"
    assert "subscribePattern" in error.text


def test_a_pattern_matches_whole_names_and_no_system_topics_by_default() -> None:
    plain = parse({"data": "/data", "subscribePattern": "new.*"}, streaming=True)
    assert plain.matches("news")
    assert not plain.matches("old.news")
    assert not plain.system
    assert parse({"data": "/data", "subscribePattern": r"\$ev.*"}, streaming=True).system


def test_the_log_is_located_by_the_environment_then_by_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYBUS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        parse({"subscribe": "news"}, streaming=False)
    assert caught.value.code == "data.not-found"
    (tmp_path / "polybus-data").mkdir()
    found = parse({"subscribe": "news"}, streaming=False)
    assert found.location.data == tmp_path / "polybus-data"
    monkeypatch.setenv("POLYBUS_DATA", str(tmp_path / "other"))
    assert parse({"subscribe": "news"}, streaming=False).location.data == tmp_path / "other"
    remote = parse({"subscribe": "news", "url": "http://h:1/", "token": "t"}, streaming=False)
    assert (remote.location.url, remote.location.token) == ("http://h:1", "t")
    assert "t'" not in repr(remote.location), "a token is not for logs"


def test_every_option_is_on_the_page_about_spark() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "spark.md"
    text = page.read_text()
    names = [*LOCATION, *(one.metadata["name"] for one in options_of(SourceOptions))]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_spark_finds_the_source_and_its_columns_without_loading_arrow() -> None:
    """Both happen one after the other in processes of their own, before the first query begins."""
    done = subprocess.run([sys.executable, "-c", LOOKED_UP], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("['offset']\n", 0), done.stderr
