"""Spark with the token of an account: its names, its rights, and no files that it may not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException
from spark_kit import RunningBus, running_bus

from polybus.client.http.blocking import read_token, request, request_json
from polybus.errors import UsageError
from polybus.spark import blob, publish, with_reference
from polybus.spark.blobs import read_blob
from polybus.spark.location import find_location


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    with running_bus(tmp_path_factory.mktemp("bus"), ["news"]) as running:
        for name in ("shop", "office"):
            ask(running, "POST", "/v1/accounts", {"name": name})
            ask(running, "POST", "/v1/topics", {"name": f"{name}/news"})
        ask(running, "POST", "/v1/topics", {"name": "shop/films"})
        grant = {"to": "office", "topics": "news", "rights": ["subscribe"]}
        ask(running, "POST", "/v1/accounts/shop/grants", grant)
        yield running


def ask(bus: RunningBus, method: str, path: str, body: Any = None) -> Any:
    return request_json(bus.url, method, path, body, token=read_token(bus.data))


def where(bus: RunningBus, account: str, by: str) -> dict[str, str]:
    token = ask(bus, "POST", f"/v1/accounts/{account}/tokens", {})["token"]
    return {"token": token} | ({"data": str(bus.data)} if by == "data" else {"url": bus.url})


def read(spark: Any, topic: str, **options: str) -> list[str]:
    rows = spark.read.format("polybus").options(subscribe=topic, **options).load()
    return [row.value.decode() for row in rows.orderBy("offset").collect()]


@pytest.mark.parametrize("by", ["data", "url"])
def test_an_account_writes_and_reads_under_its_own_names(
    spark: Any, bus: RunningBus, by: str
) -> None:
    shop, office = where(bus, "shop", by), where(bus, "office", by)
    before = read(spark, "news", **shop)
    rows = spark.sql("SELECT 'boots' AS value")
    rows.write.format("polybus").mode("append").options(topic="news", **shop).save()
    publish(rows, producer=f"etl-{by}", batch_id=0, topic="news", **shop)
    assert read(spark, "news", **shop) == [*before, "boots", "boots"]
    assert read(spark, "shop/news", **office) == [*before, "boots", "boots"]
    # Nothing is left behind, in no folder.
    assert not list((bus.data / "staging").glob("*/*"))
    # The topic of the default account has the same name, and is another.
    assert read(spark, "news", data=str(bus.data)) == []
    producers = ask(bus, "GET", f"/v1/commits/shop%2Fetl-{by}")
    assert list(producers["offsets"]) == ["shop/news"]


@pytest.mark.parametrize("by", ["data", "url"])
def test_the_files_are_only_for_who_may_read_them(spark: Any, bus: RunningBus, by: str) -> None:
    shop, office = where(bus, "shop", by), where(bus, "office", by)
    for topic, options in (("office/news", shop), ("default/news", shop), ("default/news", office)):
        with pytest.raises(PySparkException, match=r"topic\.unknown"):
            read(spark, topic, **options)
    rows = spark.sql("SELECT 'boots' AS value")
    with pytest.raises(PySparkException, match=r"auth\.denied|topic\.unknown"):
        rows.write.format("polybus").mode("append").options(topic="shop/news", **office).save()
    assert not list((bus.data / "staging").glob("*/*"))
    wrong = shop | {"token": "pbt_0_0"}
    with pytest.raises(PySparkException, match=r"auth\.failed"):
        read(spark, "news", **wrong)


@pytest.mark.parametrize("by", ["data", "url"])
def test_a_large_payload_is_read_by_who_may_read_its_topic(
    spark: Any, bus: RunningBus, by: str
) -> None:
    payload = f"payload by {by} ".encode() * 100_000
    admin = read_token(bus.data)
    path = "/v1/topics/shop%2Ffilms/blob"
    request(bus.url, "PUT", path, payload, token=admin, content_type="application/octet-stream")
    shop, office = where(bus, "shop", by), where(bus, "office", by)
    films = spark.read.format("polybus").options(subscribe="films", **shop).load()
    rows = with_reference(films).orderBy("offset")
    found = rows.select("reference", blob("reference", **shop).alias("bytes")).collect()
    assert bytes(found[-1]["bytes"]) == payload
    # The grant to the other account is for another topic: the id alone opens nothing.
    with pytest.raises(UsageError, match=r"blob\.unknown"):
        read_blob(find_location(office), found[-1]["reference"]["id"])


def test_the_administrators_token_reads_the_files(spark: Any, bus: RunningBus) -> None:
    admin = {"data": str(bus.data), "token": str(read_token(bus.data))}
    assert read(spark, "shop/news", **admin) == read(spark, "shop/news", data=str(bus.data))
