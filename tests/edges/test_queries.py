"""SQL, searches, histograms and exports: answered by processes beside the bus, within limits."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from accounts_http_kit import accounts_bus
from http_kit import Http, http_bus

from polybus.batch import Batch
from polybus.edges.http.calls import problem_of
from polybus.errors import StorageError
from polybus.lake.table import open_table
from polybus.log.layout import admin_token_path
from polybus.services.queries.forms import encoded, for_browser
from polybus.services.queries.jobs import ERROR, HEAD, SqlJob, Visibility, encode_job
from polybus.services.queries.worker import QueryWorker

NDJSON = {"content-type": "application/x-ndjson"}
ENDLESS = "SELECT count(*) FROM range(1000000000000) a, range(1000000) b"
MASKS = [{"topics": "people", "fields": ["$.name"]}]
TWO_TOPICS = ("people", "orders")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Http]:
    """A bus with twelve orders, a masked topic and a table."""
    async with http_bus("orders", "orders.eu", "people", http={"masks": MASKS}) as http:
        lines = [
            {
                "value": {"n": n, "who": {"name": "Ann" if n % 2 else "Bob"}},
                "headers": {"h": f"v{n}"},
            }
            for n in range(12)
        ]
        body = "\n".join(map(json.dumps, lines)) + '\n{"text":"plain Text"}'
        await http.client.post("/v1/topics/orders/messages", content=body, headers=NDJSON)
        await http.publish("orders.eu", b'{"n": 1}', b'{"n": 2}')
        await http.publish("people", b'{"name":"Zoe","n":1}')
        rows = pa.table({"topic": ["orders"], "n": [7]})
        open_table(http.node.data, "sums").append(rows, writer="test", batch_id=0)
        yield http


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def sql(http: Http, query: str, **how: Any) -> httpx.Response:
    headers = how.pop("headers", {})
    return await http.client.post("/v1/sql", json={"query": query, **how}, headers=headers)


async def as_admin(http: Http) -> dict[str, str]:
    return {"authorization": f"Bearer {admin_token_path(http.node.data).read_text().strip()}"}


async def search(http: Http, topic: str = "orders", **query: Any) -> dict[str, Any]:
    answer = await http.client.get(f"/v1/topics/{topic}/search", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_statement_reads_topics_with_columns_types_and_limits(shared: Http) -> None:
    answer = await sql(shared, 'SELECT "offset", text(value) AS v FROM orders ORDER BY 1')
    cut = (await sql(shared, "SELECT offset FROM orders", **{"rows-max": 3})).json()

    found = answer.json()
    assert [one["name"] for one in found["columns"]] == ["offset", "v"]
    assert (found["row-count"], found["truncated"], found["rows"][12][1]) == (
        13,
        False,
        "plain Text",
    )
    assert (cut["row-count"], cut["truncated"]) == (3, True)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("SELEC 1", "sql.invalid"),
        ("SELECT 1; SELECT 2", "sql.statement"),
        ("DROP TABLE orders", "sql.statement"),
        ("COPY orders TO '/tmp/x'", "sql.statement"),
        ("SELECT * FROM nix", "sql.table-unknown"),
        ("SELECT * FROM read_csv('/etc/passwd')", "sql.failed"),
        ("SELECT * FROM '/etc/passwd'", "sql.table-unknown"),
        ("SELECT * FROM sums", "auth.denied"),
        ("DESCRIBE HISTORY sums", "auth.denied"),
    ],
)
async def test_what_is_no_statement_to_read_is_refused(shared: Http, query: str, code: str) -> None:
    answer = await sql(shared, query)
    assert answer.status_code in (400, 403) and answer.json()["code"] == code, answer.text


async def test_an_unknown_name_is_answered_with_near_ones(shared: Http) -> None:
    near = (await sql(shared, "SELECT * FROM ordes")).json()
    assert near["detail"].startswith("there is no topic or table ordes; did you mean orders")
    far = (await sql(shared, "SELECT * FROM nix")).json()
    assert far["detail"].startswith("there is no topic or table nix; there are ")
    assert "orders" in far["detail"]


@pytest.mark.parametrize(
    ("media", "read"),
    [
        ("text/csv", lambda data: data.decode().splitlines()[1:]),
        ("application/x-ndjson", lambda data: [json.loads(one)["n"] for one in data.splitlines()]),
        (
            "application/vnd.apache.parquet",
            lambda data: pq.read_table(io.BytesIO(data)).column("n").to_pylist(),
        ),
        (
            "application/vnd.apache.arrow.stream",
            lambda data: pa.ipc.open_stream(data).read_all().column("n").to_pylist(),
        ),
    ],
)
async def test_rows_are_downloaded_in_a_form_of_choice(shared: Http, media: str, read: Any) -> None:
    query = "SELECT json(value)->>'n' AS n FROM \"orders.eu\" WHERE offset < 2 ORDER BY 1"
    answer = await sql(shared, query, headers={"accept": media})

    assert answer.headers["content-type"].startswith(media)
    assert "attachment" in answer.headers["content-disposition"]
    assert [str(one) for one in read(answer.content)] == ["1", "2"]
    assert answer.headers["polybus-truncated"] == "false"

    for rows_max, rows in ((1, ["1"]), (2, ["1", "2"])):
        cut = await sql(shared, query, headers={"accept": media}, **{"rows-max": rows_max})
        assert [str(one) for one in read(cut.content)] == rows
        assert cut.headers["polybus-truncated"] == ("true" if rows_max == 1 else "false")


async def test_a_download_that_is_larger_than_the_memory_for_it_is_whole(shared: Http) -> None:
    query = "SELECT repeat('x', 1000) AS x FROM range(50000)"
    answer = await sql(shared, query, headers={"accept": "text/csv"}, **{"rows-max": 40_000})
    assert answer.text == "x\n" + ("x" * 1000 + "\n") * 40_000
    assert answer.headers["polybus-truncated"] == "true"
    described = (await shared.client.get("/openapi.json")).json()["paths"]["/v1/sql"]["post"]
    assert "polybus-truncated" in described["responses"]["200"]["headers"]


async def test_a_full_disk_under_a_download_is_not_the_fault_of_the_query(
    shared: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def __init__(self, held_bytes: int) -> None:
            super().__init__()

        def write(self, piece: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Full)
    out = io.BytesIO()
    job = SqlJob("SELECT 1", Visibility({}), 10, "csv")
    QueryWorker(shared.node.data, out).do(encode_job(job))
    kind, _ = HEAD.unpack_from(out.getvalue())
    failed = json.loads(out.getvalue()[HEAD.size :])
    assert (kind, failed["kind"], failed["code"]) == (ERROR, "StorageError", "sql.storage")
    assert problem_of(StorageError(failed["code"], failed["text"])).status_code == 503


async def test_a_statement_that_never_ends_is_stopped_and_the_bus_continues(shared: Http) -> None:
    running = asyncio.create_task(sql(shared, ENDLESS, id="mine"))
    pool = shared.node.http.queries
    await shared.until(lambda: "default/mine" in pool._busy.values())
    await shared.publish("orders.eu", b'{"n": 3}')
    again = await sql(shared, "SELECT 1", id="mine")
    stopped = await shared.client.delete("/v1/sql/mine")

    assert (again.status_code, again.json()["code"]) == (409, "sql.id")
    assert stopped.status_code == 204
    assert ((await running).status_code, (await running).json()["code"]) == (409, "sql.stopped")
    assert (await shared.client.delete("/v1/sql/mine")).status_code == 404
    late = await sql(shared, ENDLESS, **{"time-s": 0.5})
    assert late.json()["code"] == "sql.too-slow"
    assert (await sql(shared, "SELECT 42")).json()["rows"] == [[42]]


@pytest.mark.parametrize("is_starting", [False, True])
async def test_a_download_ends_with_its_client_while_the_query_runs(
    shared: Http, monkeypatch: pytest.MonkeyPatch, is_starting: bool
) -> None:
    pool = shared.node.http.queries
    start, may_start = pool._start, asyncio.Event()

    async def held() -> Any:
        await may_start.wait()
        return await start()

    if is_starting:
        for process in [*pool._idle]:
            pool._end_idle(process)
        monkeypatch.setattr(pool, "_start", held)
    _, writer = await asyncio.open_connection("127.0.0.1", shared.node.tcp_port)
    body = json.dumps({"query": ENDLESS}).encode()
    head = f"POST /v1/sql HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    types = "content-type: application/json\r\naccept: text/csv\r\n\r\n"
    writer.write((head + types).encode() + body)
    await shared.until(lambda: pool._starting if is_starting else pool._busy)
    writer.close()
    await writer.wait_closed()
    may_start.set()
    await shared.until(lambda: not pool._busy and not pool._starting)


async def test_a_statement_that_needs_too_much_memory_fails_alone() -> None:
    # Sums of text cannot go to the disk, as sorted rows can.
    greedy = "SELECT length(string_agg(repeat('x', 1000), '')) FROM range(1000000)"
    async with http_bus("news", queries={"memory-bytes-max": 64 << 20}) as http:
        refused = await sql(http, greedy)
        await http.publish("news", b"1")
        works = await sql(http, "SELECT count(*) FROM news")

    assert refused.status_code >= 400 and refused.json()["code"].startswith("sql."), refused.text
    assert works.json().get("rows") == [[1]], works.text


async def test_queries_at_a_time_are_limited(shared: Http) -> None:
    pool = shared.node.http.queries
    tasks = [asyncio.create_task(sql(shared, ENDLESS, id=f"q{n}")) for n in range(3)]
    await shared.until(lambda: len(pool._busy) == 3)
    busy = await sql(shared, "SELECT 1")
    for n in range(3):
        await shared.client.delete(f"/v1/sql/q{n}")
    await asyncio.gather(*tasks)

    assert (busy.status_code, busy.json()["code"]) == (429, "sql.busy")


@pytest.mark.parametrize(
    ("query", "offsets"),
    [
        ({"text": "TEXT"}, [12]),
        ({"text": "v11"}, [11]),
        ({"header": "h"}, list(range(12))),
        ({"header": "h:v3"}, [3]),
        ({"path": "$.who.name", "equals": "Ann"}, [1, 3, 5, 7, 9, 11]),
        ({"path": "$.n", "equals": "4"}, [4]),
        ({"path": "n"}, list(range(12))),
        ({"path": "$['who']['name']", "equals": "Ann"}, [1, 3, 5, 7, 9, 11]),
        ({"path": "$.who[*]", "equals": "Ann"}, [1, 3, 5, 7, 9, 11]),
        ({"path": "$.n[0]"}, []),
        ({"path": "$", "equals": "4"}, []),
        ({"path": "$.n[*]"}, []),
        ({"sql": "(json(value)->>'n')::int > 9"}, [10, 11]),
        ({"sql": "protocol = 'http'", "text": "plain"}, [12]),
        ({"text": "Ann", "newest": "true", "limit": 2}, [11, 9]),
        ({"text": "nowhere"}, []),
    ],
)
async def test_messages_are_found_by_text_header_path_and_condition(
    shared: Http, query: dict[str, Any], offsets: list[int]
) -> None:
    found = await search(shared, **query)

    assert [one["offset"] for one in found["messages"]] == offsets
    assert found["is-complete"] is (found["next"] is None)
    assert found["topic"] == "orders" and found["to"] == 13


async def test_a_path_leads_to_items_by_their_number(shared: Http) -> None:
    item = b'{"items": [{"id": "a b"}, {"id": 7}]}'
    async with http_bus("carts") as http:
        await http.publish("carts", item, b'{"items": [{"id": 7}]}', b"7")
        for path, equals, offsets in (
            ("$.items[0].id", "7", [1]),
            ("items[1].id", "7", [0]),
            ("$.items[*].id", "7", [0, 1]),
            ("$.items.id", "7", [0, 1]),
            ("$['items'][0][\"id\"]", "a b", [0]),
            ("$", "7", [2]),
        ):
            found = await search(http, "carts", path=path, equals=equals)
            assert [one["offset"] for one in found["messages"]] == offsets, path


async def test_a_search_continues_where_it_ended(shared: Http) -> None:
    for newest in ("false", "true"):
        seen: list[int] = []
        place: dict[str, Any] = {}
        while True:
            found = await search(shared, text="n", limit=5, newest=newest, **place)
            seen += [one["offset"] for one in found["messages"]]
            if found["next"] is None:
                break
            place = {"stop" if newest == "true" else "from-offset": found["next"]}
        assert seen == list(range(13) if newest == "false" else range(12, -1, -1))


async def test_a_bad_search_is_refused(shared: Http) -> None:
    for query in (
        {"sql": "nix = 1"},
        {"sql": "1; 2"},
        {"limit": 0},
        {"time-s": 0},
        {"path": "$.a[?(@.b)]"},
    ):
        answer = await shared.client.get("/v1/topics/orders/search", params=query)
        assert answer.status_code == 400, answer.text
    other = {"sql": 'true) UNION ALL (SELECT "offset" FROM people'}
    answer = await shared.client.get("/v1/topics/orders/search", params=other)
    assert answer.json()["code"] == "sql.table-unknown"


async def test_what_is_masked_can_neither_be_found_nor_queried(shared: Http) -> None:
    admin = await as_admin(shared)
    query = "SELECT text(value) FROM people"
    shown = (await sql(shared, query)).json()["rows"]
    seen = (await sql(shared, query, headers=admin)).json()["rows"]

    assert (await search(shared, "people", text="zoe"))["messages"] == []
    assert (await search(shared, "people", sql="text(value) LIKE '%Zoe%'"))["messages"] == []
    (found,) = (await search(shared, "people", path="n"))["messages"]
    assert found["masked"] and found["value"]["name"] == "•••"
    assert "Zoe" not in str(shown) and "Zoe" in str(seen)
    export = await shared.client.get("/v1/topics/people/export?format=jsonl")
    assert "Zoe" not in export.text and '"n":1' in export.text.replace("\\", "")
    masked, whole = [(await sql(shared, f"SELECT * FROM {one}")).json() for one in TWO_TOPICS]
    assert masked["columns"] == whole["columns"]


async def test_a_search_ends_before_it_holds_too_much_and_continues() -> None:
    async with http_bus("large") as http:
        batch = Batch.of("large", [b"x" * 1_000_000] * 20)
        http.node.bus.commit([batch])
        for newest in ("false", "true"):
            seen: list[int] = []
            place: dict[str, Any] = {}
            answers = 0
            while True:
                query = {"newest": newest, "limit": 1000, **place}
                found = await search(http, "large", **query)
                assert 0 < len(found["messages"]) <= 17
                seen += [one["offset"] for one in found["messages"]]
                answers += 1
                if found["next"] is None:
                    break
                place = {"stop" if newest == "true" else "from-offset": found["next"]}
            assert sorted(seen) == list(range(20)) and answers == 2


async def test_a_histogram_counts_messages_over_time(shared: Http) -> None:
    found = (await shared.client.get("/v1/topics/orders/histogram?bins=10")).json()
    shown = (await shared.client.get("/v1/topics/orders")).json()
    query = {"from": "2020-01-01T00:00:00Z", "to": "2020-01-02T00:00:00Z", "bins": "24"}
    empty = (await shared.client.get("/v1/topics/orders/histogram", params=query)).json()

    assert sum(found["counts"]) == 13 and found["offsets"][0] == 0
    assert found["from"] <= shown["first-time"] <= shown["last-time"] <= found["to"]
    assert (empty["bin-s"], empty["counts"]) == (3600, [0] * 24)
    bad = await shared.client.get("/v1/topics/orders/histogram?from=yesterday")
    assert bad.status_code == 400


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
async def test_what_a_search_finds_is_exported(shared: Http, form: str) -> None:
    query = {"format": form, "path": "$.who.name", "equals": "Bob"}
    answer = await shared.client.get("/v1/topics/orders/export", params=query)

    assert f'filename="orders.{form}"' in answer.headers["content-disposition"]
    if form == "parquet":
        rows = pq.read_table(io.BytesIO(answer.content))
        assert rows.column("offset").to_pylist() == [0, 2, 4, 6, 8, 10]
        assert pq.ParquetFile(io.BytesIO(answer.content)).num_row_groups == 1
    else:
        assert len(answer.text.splitlines()) == 6 + (form == "csv")


async def test_an_export_says_whether_it_ends_at_its_limit(shared: Http) -> None:
    async def is_cut(**query: str | int) -> tuple[int, str]:
        given: dict[str, str | int] = {"format": "jsonl", "path": "$.who.name", "equals": "Bob"}
        answer = await shared.client.get("/v1/topics/orders/export", params=given | query)
        return len(answer.text.splitlines()), answer.headers["polybus-truncated"]

    assert await is_cut() == (6, "false")
    assert await is_cut(limit=5) == (5, "true")
    # Whatever follows does not match.
    assert await is_cut(limit=6) == (6, "false")
    assert await is_cut(limit=6, newest="true") == (6, "false")
    assert await is_cut(limit=2, newest="true") == (2, "true")
    assert await is_cut(limit=1, stop=1) == (1, "false")
    assert await is_cut(equals="nobody") == (0, "false")


async def test_tables_are_described_to_who_may_see_them(shared: Http) -> None:
    admin = await as_admin(shared)
    (table,) = (await shared.client.get("/v1/tables", headers=admin)).json()["tables"]
    one = (await shared.client.get("/v1/tables/sums", headers=admin)).json()
    names = (await shared.client.get("/v1/sql/names", headers=admin)).json()

    assert (table["name"], table["rows"], table["files"]) == ("sums", 1, 1) and one == table
    assert [column["name"] for column in table["columns"]] == ["topic", "n"]
    assert "orders" in [topic["name"] for topic in names["topics"]]
    assert [one["name"] for one in names["tables"]] == ["sums"]
    assert (await shared.client.get("/v1/tables")).json()["code"] == "auth.denied"
    assert (await shared.client.get("/v1/tables/nix", headers=admin)).status_code == 404


async def test_an_account_queries_its_own_topics_by_its_own_names() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        await shop.publish("news", b"mine")
        await shop.publish("shared", b"ours")
        own = await sql(shop, "SELECT text(value) FROM news")
        lent = await sql(other, 'SELECT text(value) FROM "shop/shared"')
        named = await sql(shop, "SELECT DISTINCT topic FROM news")
        secret = await sql(other, 'SELECT text(value) FROM "shop/news"')
        default = await sql(other, 'SELECT * FROM "default/news"')
        unknown = await sql(other, 'SELECT text(value) FROM "shop/newt"')

        assert (own.json()["rows"], lent.json()["rows"]) == ([["mine"]], [["ours"]])
        assert named.json()["rows"] == [["news"]]
        for refused in (secret, default):
            assert refused.json()["code"] == "sql.table-unknown"
            assert "mine" not in refused.text
        # A query is given what its caller may read, so a forbidden topic is an unknown one to it.
        assert secret.json() == json.loads(unknown.text.replace("shop/newt", "shop/news"))


async def test_a_log_in_memory_cannot_be_queried() -> None:
    async with http_bus("news", durability="memory") as http:
        assert (await sql(http, "SELECT 1")).json()["code"] == "sql.unavailable"


async def test_values_have_a_form_in_json_and_none_that_a_spreadsheet_runs() -> None:
    rows = pa.record_batch({"a": ["=1+1", "-x", "plain"], "b": [b"\xff", b"t", None]})
    text = b"".join(encoded("csv", rows.schema, [rows])).decode().splitlines()

    assert text == ["a,b", """'=1+1,"{""base64"":""/w==""}\"""", "'-x,t", "plain,"]
    assert for_browser(1 << 60) == str(1 << 60) and for_browser([("k", b"v")]) == {"k": "v"}


async def test_figures_of_days_come_from_the_log(shared: Http) -> None:
    figures = shared.node.http.figures
    figures.sample()
    figures._flushed_s -= 10
    figures.sample()
    await shared.node.context.durability.wait()
    answer = await shared.client.get("/v1/metrics/history?range-s=604800&step-s=600")
    past = answer.json()

    assert past["step-s"] == 600 and len(past["times"]) >= 1
    assert len(past["series"]["connections"]) == len(past["times"])
    assert (await shared.client.get("/v1/metrics/history?range-s=604801")).status_code == 400
